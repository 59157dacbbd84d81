"""JAX: the core's collectives in jitted functions."""
