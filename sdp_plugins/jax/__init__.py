"""JAX: the core's collectives as calls of jitted functions."""
