"""The part of SMDDP's native module that scripts use beside its documented API.

``allReduce`` and ``wait`` are not here: they take addresses of GPU memory.
"""

__all__ = ["setBucketSize"]


def setBucketSize(nbytes: int) -> None:  # noqa: N802  SMDDP's name
    """Set the size of the fusion buffers that this process makes from now on.

    Those that are given a size of their own keep it, as torch's DDP does its buckets
    (``bucket_cap_mb``).

    Args:
        nbytes: A multiple of 128; equal on all ranks.

    Raises:
        ValueError: It is none, or out of range.
    """
    from sdp_plugins.core.config import set_fusion_bytes

    set_fusion_bytes(nbytes)
