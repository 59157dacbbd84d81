"""Assigns tensors to buckets when all of them are known at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def buckets(
    tensors: Sequence[tuple[Hashable, int | None]], threshold_bytes: int
) -> list[list[int]]:
    """Put consecutive tensors of one type together, up to a size.

    Args:
        tensors: Type and size in bytes of each; None: unknown, gets its own bucket.
        threshold_bytes: Largest size of a bucket with several tensors.

    Returns:
        Indices, ascending in each bucket; buckets in the order of their last tensors.
    """
    done: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, nbytes) in enumerate(tensors):
        if nbytes is None:
            done.append([index])
            continue
        members, held = open_.pop(kind, ([], 0))
        if members and held + nbytes > threshold_bytes:
            done.append(members)
            members, held = [], 0
        open_[kind] = ([*members, index], held + nbytes)
    done += [members for members, _ in open_.values()]
    return sorted(done, key=lambda members: members[-1])
