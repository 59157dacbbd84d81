"""A rank of a `job.Job`: `python -m benchmarks.rank '{...}'`. Started by the runner only."""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.libraries.base import Place


def end_with(runner_pid: int) -> None:
    """End this rank when the runner ends, even during a collective that cannot finish."""
    runner = os.pidfd_open(runner_pid)

    def watch() -> None:
        poll = select.poll()
        poll.register(runner, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch-runner").start()


def serve(connection: Connection, task: Any) -> None:
    """Carry out commands until the runner closes the connection."""
    while True:
        command, arguments = connection.recv()
        with answering(connection) as answer:
            answer.append(getattr(task, command)(**arguments))


def load(target: str) -> Any:
    """Return the object with the name "module:name"."""
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def answering(connection: Connection) -> Iterator[list[Any]]:
    """Send the runner the items that the context appends, or the exception that it raises."""
    answer: list[Any] = []
    try:
        yield answer
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"))
    else:
        connection.send((True, answer[0]))


def main(setting: dict[str, Any]) -> None:
    """Connect, create the task, carry out commands, and clean up."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(f"{setting['folder']}/commands")
    end_with(setting["runner_pid"])
    place = Place(
        rank=setting["rank"],
        ranks=setting["ranks"],
        threads=setting["threads"],
        meeting_file=f"{setting['folder']}/store",
        shared_fd=setting["shared_fd"],
    )
    with Connection(stream.detach()) as connection:
        connection.send(place.rank)
        task = None
        with suppress(EOFError, ConnectionResetError, BrokenPipeError):
            with answering(connection) as answer:
                task = load(setting["task"])(place, **setting["arguments"])
                answer.append(None)
            if task is not None:
                serve(connection, task)
    if task is not None:
        task.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
