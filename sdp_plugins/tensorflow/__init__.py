"""TensorFlow: the core's collectives as operations of graphs."""
