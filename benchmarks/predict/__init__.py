"""Simulated training on up to thousands of nodes."""
