"""Strategies for the packages `pytorch_lightning` and `lightning_fabric`."""
