"""The plan of a case: a model and its training as plain data, from nothing but seed and index.

Plans are drawn without Keras, so that the process that compares needs none.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stress.keras import heads, training
from stress.keras.layers import INPUT_SHAPES, Row, rows_for

MOST_VALUES = 24
"""Inputs and layers of a model at most."""


@dataclass(frozen=True)
class Value:
    """An input of a model, or what a layer makes.

    Attributes:
        layer: The layer's name in the table; `Input`.
        of: The values that it is called on, by their places in the plan.
        kind: The kind of value; see `layers.py`.
        options: The layer's. Of an input `shared`: all rows are equal.
        frozen: Whether the layer is not trained.
    """

    layer: str
    of: tuple[int, ...]
    kind: str
    options: Mapping[str, Any]
    frozen: bool = False


@dataclass(frozen=True)
class Output:
    """A head with its loss and metrics.

    Attributes:
        of: The value that it stands behind, by its place.
        kind: Of that value.
        loss: Its name in `keras.losses`, its options, its weight.
        targets: What kind they are.
        activation: Of the head.
        metrics: Names and options, and whether sample weights count.
        sample_weight: Whether rows have weights.
    """

    of: int
    kind: str
    loss: str
    options: Mapping[str, Any]
    weight: float
    targets: str
    activation: str | None
    metrics: tuple[tuple[str, Mapping[str, Any], bool], ...]
    sample_weight: bool


@dataclass(frozen=True)
class Plan:
    """One case.

    Attributes:
        backend: Of Keras.
        world: How many ranks there are.
        seed: Of the data and of the initial weights.
        dtype: `float64`, `float32` or a policy of mixed precision.
        form: `functional`, `subclass` (built when it is first called) or `nested`.
        values: Inputs and layers.
        outputs: Heads.
        optimizer: Its name and options.
        fit: How it is trained; see `training.py`.
    """

    backend: str
    world: int
    seed: int
    dtype: str
    form: str
    values: tuple[Value, ...]
    outputs: tuple[Output, ...]
    optimizer: Mapping[str, Any]
    fit: Mapping[str, Any]

    @property
    def inputs(self) -> list[int]:
        """Places of the inputs."""
        return [place for place, value in enumerate(self.values) if value.layer == "Input"]

    def to_json(self) -> str:
        """In one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan of `to_json`."""
        data = json.loads(text)
        values = tuple(Value(**{**v, "of": tuple(v["of"])}) for v in data.pop("values"))
        outputs = tuple(
            Output(**{**o, "metrics": tuple(tuple(m) for m in o["metrics"])})
            for o in data.pop("outputs")
        )
        return cls(values=values, outputs=outputs, **data)

    def describe(self) -> str:
        """For people, a line for each value."""
        lines = [f"Keras on {self.backend}, {self.world} ranks, {self.dtype}, {self.form} model"]
        for place, value in enumerate(self.values):
            of = f" of {', '.join(map(str, value.of))}" if value.of else ""
            frozen = " (frozen)" if value.frozen else ""
            options = _options(value.options)
            lines.append(f"  {place}: {value.layer}({options}){of} -> {value.kind}{frozen}")
        for output in self.outputs:
            metrics = ", ".join(f"{name}({_options(o)})" for name, o, _ in output.metrics)
            lines.append(
                f"  output of {output.of}: {output.loss}({_options(output.options)})"
                f" x {output.weight}, head {output.activation}, {output.targets} targets"
                + (", sample weights" if output.sample_weight else "")
                + (f"; metrics {metrics}" if metrics else "")
            )
        lines += [f"  optimizer: {_options(self.optimizer)}", f"  fit: {_options(self.fit)}"]
        return "\n".join(lines)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)


def drawn(draw: random.Random, options: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """A value for each option; those that are None are left out."""
    chosen = {name: draw.choice(list(values)) for name, values in options.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def case(backend: str, seed: int, index: int, worlds: Sequence[int] = (2, 3)) -> Plan:
    """The plan of an index."""
    draw = random.Random(f"{seed} {index} {backend}")
    world = draw.choice([*worlds, worlds[0]])  # the more ranks the more work
    dtype = draw.choices(training.DTYPES, training.DTYPE_WEIGHTS)[0]
    values = _values(draw, backend)
    outputs = _outputs(draw, values, dtype)
    fit = training.fit(draw, backend, world, outputs)
    return json_like(
        Plan(
            backend=backend,
            world=world,
            seed=draw.randrange(2**31),
            dtype=dtype,
            form=draw.choice(["functional", "functional", "subclass", "nested"]),
            values=values,
            outputs=outputs,
            optimizer=training.optimizer(draw, backend, dtype),
            fit=fit,
        )
    )


def json_like(plan: Plan) -> Plan:
    """As it comes out of JSON, so that a plan which is read from it is the same."""
    return Plan.from_json(plan.to_json())


def _values(draw: random.Random, backend: str) -> tuple[Value, ...]:
    values = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        kind = draw.choices(list(INPUT_SHAPES), [5, 5, 4, 1, 5])[0]
        shared = kind == "ids" and draw.random() < 0.3
        values.append(Value("Input", (), kind, {"shared": True} if shared else {}))
    for place, given in enumerate(values.copy()):
        _chain(draw, backend, values, place, draw.randrange(0 if given.kind == "vector" else 1, 5))
    for _ in range(draw.choice([0, 0, 1, 2])):
        _chain(draw, backend, values, draw.randrange(len(values)), draw.randrange(1, 3))
    return tuple(values)


def _chain(draw: random.Random, backend: str, values: list[Value], place: int, length: int) -> None:
    """Put layers behind a value, one behind the other."""
    for _ in range(length):
        if len(values) >= MOST_VALUES:
            return
        rows = rows_for(values[place].kind, backend)
        row = draw.choices(rows, [row.weight for row in rows])[0]
        values.append(_layer(draw, row, values, place))
        place = len(values) - 1


def _layer(draw: random.Random, row: Row, values: Sequence[Value], place: int) -> Value:
    options = drawn(draw, row.options)
    kind = values[place].kind if row.makes == "same" else row.makes
    of: tuple[int, ...] = (place,)
    if options.pop("merge", False) or (options.pop("pair", False) and draw.random() < 0.6):
        others = [i for i, value in enumerate(values) if value.kind not in ("ids", "video")]
        same = [i for i in others if values[i].kind == kind] if "Attention" in row.layer else others
        of = (place, draw.choice(same or [place]))
    return Value(row.layer, of, kind, options, frozen=draw.random() < 0.05)


def _outputs(draw: random.Random, values: Sequence[Value], dtype: str) -> tuple[Output, ...]:
    """Behind every value that nothing uses, as far as it has a kind for heads; at least one."""
    used = {place for value in values for place in value.of}
    ends = [place for place in range(len(values)) if place not in used]
    return tuple(_output(draw, place, values[place].kind, dtype) for place in ends)


def _output(draw: random.Random, place: int, kind: str, dtype: str) -> Output:
    if kind not in heads.EVERYWHERE or (kind != "vector" and draw.random() < 0.5):
        kind = "vector"
    rows = [row for row in heads.LOSSES if kind in row.kinds]
    row = draw.choices(rows, [row.weight for row in rows])[0]
    return Output(
        of=place,
        kind=kind,
        loss=row.loss,
        options=drawn(draw, row.options) | {"reduction": draw.choice(heads.REDUCTION)},
        weight=draw.choice([1.0, 1.0, 0.3]),
        targets=row.targets,
        activation=row.activation,
        metrics=_metrics(draw, row.targets, kind, dtype),
        sample_weight=draw.random() < 0.25 and row.takes_weights(kind),
    )


def _metrics(draw: random.Random, targets: str, kind: str, dtype: str) -> tuple[Any, ...]:
    rows = [
        row
        for row in heads.METRICS[targets]
        if kind in row.kinds and not (row.jumps and dtype.startswith("mixed"))
    ]
    chosen = draw.sample(rows, min(draw.choice([0, 1, 1, 2, 3]), len(rows)))
    return tuple(
        (row.metric, drawn(draw, row.options), draw.random() < 0.3 and row.takes_weights)
        for row in chosen
    )
