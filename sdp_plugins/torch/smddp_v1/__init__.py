"""SMDDP's own API of its versions 1.0 to 1.3, over torch.distributed on the smddp backend.

Later versions only register a backend; what was written for these goes on to run.
"""
