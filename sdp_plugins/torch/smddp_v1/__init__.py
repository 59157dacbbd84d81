"""The API of SMDDP 1.0 to 1.3, over torch.distributed on the smddp backend.

Later versions of SMDDP only register a backend; scripts for these versions continue to run.
"""
