"""Registration of buckets in shared memory: from the second step on, DDP's need no copy.

DDP passes the same few storages to all_reduce in every step. When a storage appears for the second
time, its bytes move into a memfd, in place: all tensors that view the storage (bucket views,
`.grad`) follow, and peers can map it. As a consequence, forked children share the memory, the
storage cannot be resized, and an address taken earlier (data_ptr, a DLPack export) is invalid,
which may crash a legal program. Only buckets of DDP's reducer therefore move automatically: those
that the reducer itself passes, and those that a comm hook has received from it as a `GradBucket`.
Any other storage moves when its owner calls `sdp_plugins.torch.share`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from sdp_plugins.core import Group, SdpError, SharedMemoryError
from sdp_plugins.torch.ddp_reducer import in_grad_bucket
from sdp_plugins.torch.shared_storage import move_to_shared_memory, shared_fd

log = logging.getLogger(__name__)

MIN_BYTES = 2**20
"""Below this size, copying costs less than keeping registrations."""


@dataclass
class Sighting:
    """A storage that was seen, and its address when it was registered."""

    storage: weakref.ref[UntypedStorage]
    pointer: int = 0
    nbytes: int = 0
    registration: int | None = None


class Registrations:
    """The storages of one group's all_reduces.

    The Python object of a storage lives as long as the storage and supports weak references. The
    reference's callback runs before the memory is unmapped, and every call checks `dead` first. A
    registration is therefore withdrawn before its address can belong to other memory. Unless
    enabled, all memory stays as it is.
    """

    def __init__(self, group: Group, enabled: bool) -> None:
        self._group = group
        self._enabled = self._automatic = enabled
        self._lock = threading.RLock()  # re-entrant: a signal handler may close the group
        self._sightings: dict[int, Sighting] = {}
        self.dead: deque[int] = deque()
        """Registrations of freed storages; any thread appends to it, `drop_dead` empties it."""

    def see(self, tensor: Tensor, by_reducer: bool, in_flight: Callable[[int], bool]) -> None:
        """Note that `tensor` is about to be all-reduced; register a bucket that comes back.

        Args:
            tensor: A dense CPU tensor of at least `MIN_BYTES`.
            by_reducer: Whether DDP's reducer itself makes the call.
            in_flight: Whether an operation uses the storage with this `_cdata`.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if self._is_registered(key, storage):
                return
            if not self._automatic or not is_bucket(tensor, storage, by_reducer):
                return
            sighting = self._sightings.get(key)
            if sighting is None:
                self._sighting(key, storage)
            elif not reason_to_stay(tensor, storage) and not in_flight(key):
                self._register_if_possible(sighting, storage)

    def share(self, tensor: Tensor, in_flight: Callable[[int], bool]) -> None:
        """Register a tensor's storage now.

        Raises:
            ValueError: The storage may not move.
            SharedMemoryError: There is not enough shared memory.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if not self._enabled or self._is_registered(key, storage):
                return
            reason = reason_to_stay(tensor, storage)
            if not reason and in_flight(key):
                reason = "an operation on it is in flight. Hint: wait for it"
            if reason:
                raise ValueError(f"The tensor's memory cannot move: {reason}.")
            try:
                self._register(self._sighting(key, storage), storage)
            except (OSError, RuntimeError, AttributeError) as error:
                raise SharedMemoryError(
                    f"A tensor of {storage.nbytes()} bytes cannot move into shared memory "
                    f"({error}). Hint: free memory, or go on without sharing it."
                ) from error

    def _is_registered(self, key: int, storage: UntypedStorage) -> bool:
        """Return whether peers can map the storage; its memory may have changed since."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.registration is None:
            return False
        if (storage.data_ptr(), storage.nbytes()) == (sighting.pointer, sighting.nbytes):
            return True
        del self._sightings[key]  # the storage was resized or swapped
        self._group.unregister(sighting.registration)
        return False

    def _sighting(self, key: int, storage: UntypedStorage) -> Sighting:
        if key not in self._sightings:
            self._sightings[key] = Sighting(weakref.ref(storage, self._on_death(key)))
        return self._sightings[key]

    def drop_dead(self) -> None:
        """Withdraw the registrations of freed storages."""
        while self.dead:
            self._group.unregister(self.dead.pop())

    def _on_death(self, key: int) -> Callable[[object], None]:
        # Runs wherever the last reference is dropped, perhaps inside the group: only take notes.
        sightings, dead = self._sightings, self.dead

        def note(reference: object) -> None:
            sighting = sightings.get(key)
            if sighting is not None and sighting.storage is reference:
                del sightings[key]
                if sighting.registration is not None:
                    dead.append(sighting.registration)

        return note

    def _register_if_possible(self, sighting: Sighting, storage: UntypedStorage) -> None:
        try:
            self._register(sighting, storage)
        except (OSError, SdpError, RuntimeError, AttributeError) as error:
            self._automatic = False
            log.warning(
                "smddp cannot put a bucket of %.1f MiB into shared memory (%s): gradients are "
                "copied from now on. Hint: free memory, or set SDP_REGISTER=0 to silence this.",
                storage.nbytes() / 2**20,
                error,
            )

    def _register(self, sighting: Sighting, storage: UntypedStorage) -> None:
        move_to_shared_memory(storage, self._group.local_size)
        pointer, nbytes = storage.data_ptr(), storage.nbytes()
        registration = self._group.register(pointer, nbytes, shared_fd(storage))
        sighting.pointer, sighting.nbytes, sighting.registration = pointer, nbytes, registration


def is_bucket(tensor: Tensor, storage: UntypedStorage, by_reducer: bool) -> bool:
    """Return whether the tensor is all of a bucket of DDP's reducer."""
    return (
        tensor.dim() == 1
        and tensor.storage_offset() == 0
        and tensor.nbytes == storage.nbytes()
        and (by_reducer or in_grad_bucket(storage))
    )


def reason_to_stay(tensor: Tensor, storage: UntypedStorage) -> str:
    """Return why the storage may not move; empty if it is torch's own memory and may move."""
    if storage.is_shared():  # shared memory stays where it is
        return "" if shared_fd(storage) >= 0 else "it is shared through a file that is closed"
    # Memory that NumPy also uses, or that came through DLPack or from a file, is not resizable.
    if not storage.resizable():
        return "something other than torch refers to it. Hint: share tensor.clone()"
    if torch.cuda.is_initialized() and tensor.is_pinned():
        return "it is pinned. Hint: share a tensor that is not pinned"
    return ""
