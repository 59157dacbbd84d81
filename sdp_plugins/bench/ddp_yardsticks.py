"""Names of what DDP is compared with beside the backends; known to the command and its ranks."""

NONE = "none"  # no communication: inside no_sync
FLOOR = "floor"  # DDP's own work with its buckets, and ranks in step, but nothing is reduced
YARDSTICKS = (NONE, FLOOR)
