"""Names of what DDP is compared with beside the backends; known to the command and its ranks."""

NO_COMM = "no_comm"  # inside no_sync
LOWER_BOUND = "lower_bound"  # DDP fills its buckets and the ranks meet, but nothing is reduced
REFERENCES = (NO_COMM, LOWER_BOUND)
