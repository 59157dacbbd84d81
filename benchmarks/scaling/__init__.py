"""Training under DDP across nodes: gloo, smddp, and smddp over MPI."""
