"""Local updates of the ranks of a group: when they exchange, and what a checkpoint needs."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CollectiveMismatchError, SdpError, add_note
from ..tensor_lists import gathered_if_alike
from ..wire_encoding import Unchanged, encoding_of
from .background import background
from .fragment import Fragment
from .outer_step import AVERAGE, OuterStep
from .parameters import Floats, Parameters
from .schedule import Schedule
from .wire import refuse_options

if TYPE_CHECKING:
    from ..group import Group

_AS_MANY = "take the same number of optimizer steps on all ranks (a GradScaler skips some)"
_EACH_ITS_OWN = (
    "save a state on each rank at the same step, and load it there, with the same settings; on all "
    "ranks or on none"
)
_ALIKE = "pass the same arguments and build the same model on all ranks"
_ENTRIES = frozenset(
    ("settings", "rank", "world_size", "steps", "exchange", "gap", "anchors", "momenta")
)
_CLOSE_FIRST = "close the local updates before the process group is destroyed"


@dataclass
class _Exchange:
    fragment: int
    due: int
    done: Future[None]


class LocalUpdates:
    """Local updates of the ranks of a group.

    Args:
        group: The ranks; nobody else uses it. It must stay open.
        parameters: The model's.
        schedule: When fragments are exchanged.
        outer: The optimizer of the outer steps.
        on_round: Called after all fragments have arrived, at the end of a round.

    Attributes:
        steps: Steps of this rank so far.

    Raises:
        CollectiveMismatchError: The ranks' arguments or models differ.
        ValueError: The group's wire dtype has options.
    """

    def __init__(
        self,
        group: Group,
        parameters: Parameters,
        schedule: Schedule,
        outer: OuterStep,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._group, self._parameters, self._schedule = group, parameters, schedule
        self._outer, self._on_round = outer, on_round
        arguments = f"{schedule}, {outer}"
        self._settings = f"{arguments}, fragments of {list(parameters.counts)} values"
        with background():  # the first collective starts threads
            self._compare([arguments, *parameters.described], _ALIKE)
        wire = group.wire_dtype
        refuse_options(wire)
        encoding = Unchanged(4) if wire is None else encoding_of(wire)
        self._fragments = [Fragment(group, n, encoding) for n in parameters.counts]
        self._gap = np.zeros(max(f.padded for f in self._fragments), np.float32)
        self._exchange: _Exchange | None = None
        self.steps = 0

    def share(self) -> None:
        """Give all ranks rank 0's parameters and number of steps; a collective."""
        self.close()
        self._exchange = None
        self._compare(["begin with rank 0's parameters"], _EACH_ITS_OWN)
        self.steps = int(self._group.exchange(str(self.steps).encode())[0])
        for index, fragment in enumerate(self._fragments):
            self._parameters.read(index, fragment.anchor)
            self._group.broadcast(fragment.anchor, 0)
            self._parameters.write(index, fragment.anchor)
        self._on_round()

    def step(self) -> None:
        """Count a step of the optimizer; exchange what is due.

        Raises:
            SdpError: An exchange has failed.
        """
        self.steps += 1
        if self._exchange is not None and self.steps >= self._exchange.due:
            self._finish()
        fragment = self._schedule.begins(self.steps)
        if fragment is not None:
            self._begin(fragment)

    def synchronize(self) -> None:
        """Make the parameters of all ranks their average; a collective.

        At the end of a training, for example. It is no outer step: the momenta stay as they are,
        and a second call changes nothing.
        """
        self._finish()
        name = f"synchronize() after step {self.steps}"
        with self._named(name):
            self._compare([name], _AS_MANY)
            for index, fragment in enumerate(self._fragments):
                fragment.exchange(self._read_gap(index), AVERAGE)
                self._parameters.write(index, fragment.anchor)
        self._on_round()

    def close(self) -> None:
        """Wait for the exchange that is on its way."""
        if self._exchange is not None:
            self._exchange.done.exception()

    # ---- exchanges -----------------------------------------------------------------------------

    def _begin(self, index: int) -> None:
        gap, step, delay = self._read_gap(index), self.steps, self._schedule.delay
        if not delay:
            self._outer_step(index, gap, step)
            self._take_over(index)
            return
        exchange = _Exchange(index, step + delay, Future())

        def run() -> None:
            try:
                self._outer_step(index, gap, step)
            except BaseException as error:
                exchange.done.set_exception(error)
            else:
                exchange.done.set_result(None)

        # A daemon: a program that fails must not wait for ranks that wait for it elsewhere.
        with background():
            threading.Thread(target=run, name="sdp-updates", daemon=True).start()
        self._exchange = exchange  # not before: nobody completes it if there can be no thread

    def _outer_step(self, index: int, gap: Floats, step: int) -> None:
        fragment, name = self._fragments[index], f"the outer step of step {step}"
        anchor, behind = fragment.anchor, gap[: len(fragment.anchor)]
        with self._named(name):
            self._compare([name], _AS_MANY)
            before = self._parameters.rounded(index, anchor) if self._schedule.delay else None
            if before is None:  # parameters hold all of the anchor, or take it over as it is
                fragment.exchange(gap, self._outer)
                return
            sent = before - behind
            fragment.exchange(gap, self._outer)
            # What is less than the parameters' precision stays in the anchor until it is more.
            behind[:] = self._parameters.rounded(index, anchor)
            behind -= sent

    def _finish(self) -> None:
        """Take over the result of the exchange that is on its way."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.done.result()
            self._take_over(exchange.fragment)

    def _take_over(self, index: int) -> None:
        anchor = self._fragments[index].anchor
        if self._schedule.delay:
            self._parameters.add(index, self._gap[: len(anchor)])
        else:
            self._parameters.write(index, anchor)
        if index == len(self._fragments) - 1:
            self._on_round()

    def _read_gap(self, index: int) -> Floats:
        fragment = self._fragments[index]
        gap = self._gap[: fragment.padded]
        self._parameters.gap(index, fragment.anchor, gap[: len(fragment.anchor)])
        return gap

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except CollectiveMismatchError:
            raise  # it names the steps of all ranks
        except SdpError as error:
            hint = _CLOSE_FIRST if error.kind == "closed" else _AS_MANY
            add_note(error, f"It was part of {name} of local updates. Hint: {hint}.")
            raise

    def _compare(self, mine: Sequence[str], hint: str) -> None:
        gathered_if_alike(self._group, "local updates", mine, hint=f"{hint}.")

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs, beside its parameters and its optimizer, to continue exactly.

        Waits for the exchange that is on its way; one that has failed has changed nothing. Arrays
        are copies.
        """
        exchange = self._exchange
        if exchange is not None and exchange.done.exception() is not None:
            exchange = None
        return {
            **self._identity(),
            "steps": self.steps,
            "exchange": None if exchange is None else (exchange.fragment, exchange.due),
            "gap": self._gap.copy() if exchange is not None else None,
            "anchors": [fragment.anchor.copy() for fragment in self._fragments],
            "momenta": [fragment.momenta.copy() for fragment in self._fragments],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of this rank; a collective.

        Raises:
            CollectiveMismatchError: It is that of another rank; or the ranks' states are of
                different steps.
            ValueError: The states of all ranks are of other settings.
        """
        self.close()  # its exchange uses the group
        problem = self._problem(state)
        what = problem or (
            f"step {state['steps']}, exchange {state['exchange']}, "
            f"{[zlib.crc32(anchor) for anchor in state['anchors']]}"
        )
        self._compare([f"load_state_dict() of {what}"], _EACH_ITS_OWN)
        if problem:
            raise ValueError(
                f"{self._group.error_prefix}local updates: load_state_dict() of {problem}. "
                f"Hint: {_EACH_ITS_OWN}."
            )
        self.steps, self._exchange = state["steps"], None
        if state["exchange"] is not None:
            fragment, due = state["exchange"]
            self._exchange = _Exchange(fragment, due, Future())
            self._exchange.done.set_result(None)
            self._gap[:] = state["gap"]
        kept = zip(self._fragments, state["anchors"], state["momenta"], strict=True)
        for one, anchor, momenta in kept:
            one.anchor[:], one.momenta[:] = anchor, momenta

    def _problem(self, state: Mapping[str, Any]) -> str:
        """Why the state is not this rank's."""
        if missing := _ENTRIES - state.keys():
            return f"what is no state of local updates: it lacks {min(missing)!r}"
        wrong = ((name, mine) for name, mine in self._identity().items() if state[name] != mine)
        return next((f"a state whose {n} is {state[n]}, not {mine}" for n, mine in wrong), "")

    def _identity(self) -> dict[str, Any]:
        rank, ranks = self._group.rank, self._group.world_size
        return {"settings": self._settings, "rank": rank, "world_size": ranks}
