"""Buckets in shared memory: DDP's are reduced without a copy from their second step on.

DDP hands the same few storages to all_reduce in every step. When one comes for the second time, its
bytes move into a memfd, in place: all tensors that view the storage (bucket views, `.grad`) follow,
and peers can map it. What this changes is that forked children share the memory, that the storage
cannot be resized, and that an address taken before (data_ptr, a DLPack export) is void, which may
crash a legal program. So nothing moves by itself but what only DDP's reducer is known to hand in;
everything else moves when its owner asks for it with `sdp_plugins.torch.share`.
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
from sdp_plugins.torch.shared_storage import move_to_shared_memory, shared_fd

log = logging.getLogger(__name__)

MIN_BYTES = 2**20
"""Below this, copying costs less than keeping registrations."""


@dataclass
class Sighting:
    """A storage that was seen, and where it was when it was registered."""

    storage: weakref.ref[UntypedStorage]
    pointer: int = 0
    nbytes: int = 0
    registration: int | None = None


class Registrations:
    """The storages of one group's all_reduces.

    Python objects of storages live as long as the storages themselves and may be weakly referenced;
    the reference's callback runs before the memory is unmapped. So a registration is withdrawn
    before its address can mean something else: `dead` is checked at the start of every call.

    Args:
        group: Where to register.
        enabled: False to leave all memory as it is.
    """

    def __init__(self, group: Group, enabled: bool) -> None:
        self._group = group
        self._enabled = self._automatic = enabled
        self._lock = threading.RLock()  # as a signal handler may leave the group
        self._sightings: dict[int, Sighting] = {}
        self.dead: deque[int] = deque()
        """Registrations whose storage has died; filled by any thread, emptied by `drop_dead`."""

    def see(self, tensor: Tensor, in_flight: Callable[[int], bool]) -> None:
        """Note that `tensor` is about to be all_reduced; register a bucket that comes back.

        Args:
            tensor: A dense CPU tensor of at least `MIN_BYTES`.
            in_flight: Whether an operation uses the storage with this `_cdata`.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if self._is_registered(key, storage):
                return
            if not self._automatic or not is_bucket(tensor, storage):
                return
            sighting = self._sightings.get(key)
            if sighting is None:
                self._sighting(key, storage)
            elif not reason_to_stay(tensor, storage) and not in_flight(key):
                self._register_if_possible(sighting, storage)

    def share(self, tensor: Tensor, in_flight: Callable[[int], bool]) -> None:
        """Register a tensor's storage now.

        Raises:
            ValueError: It may not move.
            SharedMemoryError: There is no shared memory for it.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        with self._lock:
            if not self._enabled or self._is_registered(key, storage):
                return
            reason = reason_to_stay(tensor, storage)
            if not reason and in_flight(key):
                reason = "an operation that works on it is in flight. Hint: wait for it"
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
        """Whether peers can map the storage; what they map may have become something else."""
        sighting = self._sightings.get(key)
        if sighting is None or sighting.registration is None:
            return False
        if (storage.data_ptr(), storage.nbytes()) == (sighting.pointer, sighting.nbytes):
            return True
        del self._sightings[key]  # it was resized or swapped
        self._group.unregister(sighting.registration)
        return False

    def _sighting(self, key: int, storage: UntypedStorage) -> Sighting:
        if key not in self._sightings:
            self._sightings[key] = Sighting(weakref.ref(storage, self._on_death(key)))
        return self._sightings[key]

    def drop_dead(self) -> None:
        """Withdraw the registrations of dead storages."""
        while self.dead:
            self._group.unregister(self.dead.pop())

    def _on_death(self, key: int) -> Callable[[object], None]:
        # Runs wherever the last reference goes, perhaps inside the group: only take notes.
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


def is_bucket(tensor: Tensor, storage: UntypedStorage) -> bool:
    """Whether this looks like DDP's reducer: a flat tensor, in a backward pass, all of its storage.

    Comm hooks are called in the backward pass too, with the same tensor.
    """
    return (
        torch._C._current_graph_task_id() != -1
        and tensor.dim() == 1
        and tensor.storage_offset() == 0
        and tensor.nbytes == storage.nbytes()
    )


def reason_to_stay(tensor: Tensor, storage: UntypedStorage) -> str:
    """Why the storage may not move; empty if it may, being torch's own memory."""
    if storage.is_shared():  # it stays where it is
        return "" if shared_fd(storage) >= 0 else "it is shared through a file that is closed"
    # Memory that NumPy also refers to, or that came by DLPack or from a file, is not resizable.
    if not storage.resizable():
        return "something else than torch refers to it. Hint: share tensor.clone()"
    if torch.cuda.is_initialized() and tensor.is_pinned():
        return "it is pinned. Hint: share a tensor that is not pinned"
    return ""
