"""Names of DDP's references beside the backends; the command and its ranks use them."""

NO_COMM = "no_comm"  # runs inside no_sync
LOWER_BOUND = "lower_bound"  # DDP fills buckets and the ranks synchronize, but nothing is reduced
REFERENCES = (NO_COMM, LOWER_BOUND)
