"""What a rank started by `tests.ranks` runs: take functions from a connection, send back outcomes.

Started by path, so that nothing is imported before `sys.path` is the parent's.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

PR_SET_PDEATHSIG = 1


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


def main() -> None:
    """Serve cases until the parent closes the connection."""
    fd, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    os.set_inheritable(fd, False)
    connection = Connection(fd)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    import tests.ranks

    tests.ranks.parent_connection = connection
    with contextlib.suppress(EOFError):
        while True:
            environment, payload = pickle.loads(connection.recv_bytes())
            os.environ.update(environment)
            reply(connection, run_case(payload))
    for value in tests.ranks.kept.values():
        if hasattr(value, "close"):
            value.close()


if __name__ == "__main__":
    main()
