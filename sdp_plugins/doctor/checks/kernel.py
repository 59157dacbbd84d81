"""What the core asks of the kernel, tried."""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing

from sdp_plugins.doctor.finding import Finding, error, ok, warning
from sdp_plugins.doctor.machine import Machine

_SECCOMP = "run outside of this sandbox, or with a seccomp profile that allows"


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """A memory file can be made and mapped."""
    try:
        file = os.memfd_create("sdp-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, mmap.PAGESIZE)
            mmap.mmap(file, mmap.PAGESIZE).close()
        finally:
            os.close(file)
    except OSError as failed:
        yield error(
            f"the ranks cannot share memory ({failed.strerror})",
            f"{_SECCOMP} memfd_create (docker run --security-opt seccomp=unconfined shows whether "
            "that is it)",
        )
    else:
        yield ok("memory can be shared between processes")


def end_of_processes(machine: Machine) -> Iterator[Finding]:
    """The end of a peer can be noticed."""
    try:
        file = os.pidfd_open(os.getpid())
        try:
            select.select([file], [], [], 0)
        finally:
            os.close(file)
    except OSError as failed:
        yield warning(
            f"this kernel does not tell of a process's end ({failed.strerror}), so a killed rank "
            "whose data loaders live is noticed at the time-out only",
            f"Linux 5.3 or later; {_SECCOMP} pidfd_open",
        )
    else:
        yield ok("the end of a peer is noticed at once")


def local_sockets(machine: Machine) -> Iterator[Finding]:
    """A process can pass an open file to another, as ranks do with their memory."""
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    try:
        with socket.socket(*kind) as listener, socket.socket(*kind) as sender:
            listener.bind(f"\0sdp-doctor-{os.getpid()}".encode())
            listener.listen(1)
            sender.connect(listener.getsockname())
            with closing(listener.accept()[0]) as receiver:
                rights = array.array("i", [sender.fileno()])
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                sender.sendmsg([b"file"], ancillary, socket.MSG_DONTWAIT)
                receiver.setblocking(False)
                os.close(socket.recv_fds(receiver, 4, 1)[1][0])
    except (OSError, IndexError) as failed:
        yield error(
            f"ranks cannot pass their memory to each other by a Unix socket ({failed})",
            f"{_SECCOMP} sockets of AF_UNIX and SCM_RIGHTS",
        )
    else:
        yield ok("ranks can pass their memory to each other")


def packets(machine: Machine) -> Iterator[Finding]:
    """Packets of a rendezvous fit the sockets' buffers."""
    most = machine.number("proc/sys/net/core/wmem_max")
    if most is not None and most < 2 * 65536:
        yield error(
            f"net.core.wmem_max is {most}, and packets of a rendezvous have up to 65 KiB",
            "sudo sysctl net.core.wmem_max=212992",
        )
    else:
        yield ok("packets of a rendezvous fit the sockets' buffers")


def page_map(machine: Machine) -> Iterator[Finding]:
    """The kernel tells which pages were written, as ShardedOptimizer asks."""
    try:
        with open(machine.root / "proc/self/pagemap", "rb"):
            yield ok("the kernel tells which pages were written")
    except OSError as failed:
        yield warning(
            f"/proc/self/pagemap cannot be read ({failed.strerror}), so ShardedOptimizer and "
            "smddp_sharded refuse to work",
            'mount /proc as the kernel has it, or use strategy="smddp" and DDP',
        )
