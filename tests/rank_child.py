"""What a rank started by `tests.ranks` runs: take functions from a connection, send back outcomes.

Started by path, so that nothing is imported before `sys.path` is the parent's; or forked by a
process that is started so and does nothing else: `tests.forked` has the other end.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1
ADOPTION_LIMIT_S = 200.0


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this rank when the test process ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        os._exit(1)


def load(payload: bytes) -> tuple[Any, tuple[Any, ...]]:
    """Unpickle a case; a text is the source of a module with `main(rank, world, *args)`."""
    function, args = pickle.loads(payload)
    if isinstance(function, str):
        namespace: dict[str, Any] = {"__name__": "rank_source"}
        exec(compile(function, "<rank source>", "exec"), namespace)
        function = namespace["main"]
    return function, args


def portable(error: BaseException) -> BaseException | None:
    """The exception itself if it survives pickling, else None."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def run_case(payload: bytes) -> tuple[Any, ...]:
    """One case's outcome: (kind, value or error, traceback text, monotonic time of the end)."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        function, args = load(payload)
        # At its end Python would collect what torch's modules left: half a second of every rank.
        gc.freeze()
        value = function(rank, world, *args)
        return ("returned", value, "", time.monotonic())
    except SystemExit:
        raise
    except BaseException as error:
        return ("raised", portable(error), traceback.format_exc(), time.monotonic())


def reply(connection: Connection, outcome: tuple[Any, ...]) -> None:
    """Send an outcome; a value that cannot be pickled is a failure of that rank."""
    try:
        payload = pickle.dumps(outcome)
    except Exception:
        text = "the result cannot be pickled\n" + traceback.format_exc()
        payload = pickle.dumps(("raised", None, text, time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send_bytes(payload)


def serve(connection: Connection) -> None:
    """Run cases until the parent closes the connection."""
    import tests.ranks

    tests.ranks.parent_connection = connection
    with contextlib.suppress(EOFError):
        while True:
            environment, payload = pickle.loads(connection.recv_bytes())
            os.environ.update(environment)
            reply(connection, run_case(payload))
            gc.collect()  # what a case leaves in cycles, as errors do, ends with it
    for value in tests.ranks.kept.values():
        if hasattr(value, "close"):
            value.close()


def orphan() -> int:
    """Fork a process that is not our child; its id, and 0 in itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(grandchild).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    pid = int(os.read(reading, 100))
    os.close(reading)
    return pid


def wait_for_parent(pid: int) -> None:
    """Return when this process is a child of `pid`: at once, when who forked it has ended."""
    end = time.monotonic() + ADOPTION_LIMIT_S
    while os.getppid() != pid:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.0005)


def become_a_rank(
    environment: dict[str, str], parent_pid: int, connection: int, output: int
) -> Connection:
    """What `subprocess` does for others."""
    os.setsid()
    wait_for_parent(parent_pid)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    return prepare(connection, parent_pid)


def import_and_freeze(module: str) -> None:
    """Import a module; what it holds is not looked at again, and so stays shared."""
    with contextlib.suppress(Exception):  # what cannot be imported is told by the rank
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def serve_forks(server: socket.socket, parent_pid: int) -> Connection | None:
    """Fork until the parent closes the socket; the connection to serve in what was forked."""
    while True:
        request, fds, _, _ = socket.recv_fds(server, 2**20, 2)
        if not request:
            return None
        module, environment = pickle.loads(request)
        import_and_freeze(module)
        pid = orphan()
        if pid == 0:
            server.close()
            return become_a_rank(environment, parent_pid, *fds)
        for fd in fds:
            os.close(fd)
        server.send(str(pid).encode())


def prepare(fd: int, parent_pid: int) -> Connection:
    """What every rank does first."""
    die_with_parent(parent_pid)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    os.set_inheritable(fd, False)
    return Connection(fd)


def main() -> None:
    """Serve cases, or fork those that do."""
    how, fd, parent_pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    connection: Connection | None
    if how == "forks":
        die_with_parent(parent_pid)
        server = socket.socket(fileno=fd)
        sys.path[:], module = pickle.loads(server.recv(2**20))
        import_and_freeze(module)
        connection = serve_forks(server, parent_pid)
    else:
        connection = prepare(fd, parent_pid)
        sys.path[:] = pickle.loads(connection.recv_bytes())
    if connection is not None:
        serve(connection)


if __name__ == "__main__":
    main()
