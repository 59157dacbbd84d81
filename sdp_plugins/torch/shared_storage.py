"""Moving a torch storage into memory that other processes can map."""

# torch shares tensors between processes with these functions; its stubs lack them.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import errno
import os
import threading

from torch import UntypedStorage

from sdp_plugins.core.memory_limits import available_bytes

MARGIN_BYTES = 64 * 2**20

# One lock for the process, as storages belong to it: two groups' threads may move the same storage.
_moving = threading.Lock()


def move_to_shared_memory(storage: UntypedStorage, ranks: int) -> None:
    """Move a CPU storage's bytes into a memfd, in place, and free the old memory.

    A storage that is already shared stays where it is.

    Unlike the file of `share_memory_()`, a memfd has no name that could be left behind, and it does
    not count towards the limit of /dev/shm, which is 64 MiB in most containers.

    Args:
        storage: The storage to move.
        ranks: How many processes of this machine are likely to move one at the same time.

    Raises:
        OSError: There is not enough memory.
    """
    with _moving:
        if not storage.is_shared():
            _move(storage, ranks)


def _move(storage: UntypedStorage, ranks: int) -> None:
    nbytes = storage.nbytes()
    if available_bytes() < ranks * nbytes + MARGIN_BYTES:
        raise OSError(errno.ENOMEM, f"{ranks} ranks need {nbytes} more bytes each for a moment")
    fd = os.memfd_create("sdp-bucket", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # fails here instead of with SIGBUS on first access
        shared = UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # has its own descriptor
    finally:
        os.close(fd)
    shared.copy_(storage)
    storage._swap_data_ptr_(shared)


def shared_fd(storage: UntypedStorage) -> int:
    """Return the file descriptor that a shared storage owns; -1 if it has none."""
    try:
        return int(storage._get_shared_fd())
    except RuntimeError:
        return -1
