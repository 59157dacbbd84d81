"""SMDDP's names for PyTorch."""
