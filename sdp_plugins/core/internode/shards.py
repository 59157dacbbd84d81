"""Equal parts of a buffer."""

from __future__ import annotations

ALIGN_ELEMS = 32


def shard(total: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of one of `parts` equal shards.

    All start at multiples of 32 elements and only the last ones are shorter, as in the native
    core's ``Shards``.
    """
    length = -(-total // parts)
    length = -(-length // ALIGN_ELEMS) * ALIGN_ELEMS
    begin = min(index * length, total)
    return begin, min(length, total - begin)
