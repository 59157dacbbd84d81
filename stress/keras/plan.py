"""The plan of a case: a model and its training as plain data, from seed and index only.

Drawing a plan needs no Keras, so the comparing process does not import it.
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
"""The maximum number of inputs and layers of a model."""


@dataclass(frozen=True)
class Size:
    """The numbers from which a model's size is drawn.

    Attributes:
        inputs: Numbers of inputs.
        longest: The maximum number of layers that follow an input.
        branches: Numbers of chains that begin at any value.
    """

    inputs: Sequence[int]
    longest: int
    branches: Sequence[int]


LARGE = Size((1, 1, 1, 2, 3), 4, (0, 0, 1, 2))
SMALL = Size((1, 1, 1, 2), 3, (0, 0, 0, 1))
SIZES = {"torch": LARGE, "tensorflow": SMALL, "jax": SMALL}
"""Small where tracing and compiling, in proportion to the layers, is most of a case's time."""


@dataclass(frozen=True)
class Value:
    """An input of a model, or the output of a layer.

    Attributes:
        layer: The layer's name in the table, or `Input`.
        of: The layer's input values, by their positions in the plan.
        kind: The kind of value; see `layers.py`.
        options: The layer's options. `shared` on an input: all rows are equal.
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
        of: The value of the head, by its position.
        kind: The kind of that value.
        loss: Its name in `keras.losses`, its options, its weight.
        targets: The kind of targets.
        activation: The head's activation.
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
        backend: Keras' backend.
        world: Number of ranks.
        seed: The seed of the data and of the initial weights.
        dtype: `float64`, `float32` or a policy of mixed precision.
        form: `functional`, `subclass` (built by its first call) or `nested`.
        values: Inputs and layers.
        outputs: Heads.
        optimizer: Its name and options.
        fit: The training options; see `training.py`.
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
        """The positions of the inputs."""
        return [place for place, value in enumerate(self.values) if value.layer == "Input"]

    def to_json(self) -> str:
        """Return the plan as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan of `to_json`."""
        data = json.loads(text)
        values = tuple(Value(**{**v, "of": tuple(v["of"])}) for v in data.pop("values"))
        outputs = tuple(
            Output(**{**o, "metrics": tuple(tuple(m) for m in o["metrics"])})
            for o in data.pop("outputs")
        )
        return cls(values=values, outputs=outputs, **data)

    def describe(self) -> str:
        """Return a readable description, with a line for each value."""
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
    """Draw a value for each option; leave out options that are None."""
    chosen = {name: draw.choice(list(values)) for name, values in options.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def case(backend: str, seed: int, index: int, worlds: Sequence[int] = (2, 3)) -> Plan:
    """Return the plan of an index."""
    draw = random.Random(f"{seed} {index} {backend}")
    world = draw.choice([*worlds, worlds[0]])  # more ranks mean more work
    dtype = draw.choices(training.DTYPES, training.DTYPE_WEIGHTS)[0]
    values = _values(draw, backend)
    outputs = _outputs(draw, backend, values, dtype)
    fit = training.fit(draw, backend, world, outputs)
    if backend == "tensorflow" and any(value.options.get("shared") for value in values):
        # A known limit: an eager step takes equal ids on all ranks for ids that no row has.
        fit.pop("run_eagerly", None)
    return json_like(
        Plan(
            backend=backend,
            world=world,
            seed=draw.randrange(2**31),
            dtype=dtype,
            form=draw.choice(["functional", "functional", "subclass", "nested"]),
            values=values,
            outputs=outputs,
            optimizer=training.optimizer(draw, backend, dtype, outputs),
            fit=fit,
        )
    )


def json_like(plan: Plan) -> Plan:
    """Convert a plan to the form that JSON returns, so that reading it back gives the same plan."""
    return Plan.from_json(plan.to_json())


def _values(draw: random.Random, backend: str) -> tuple[Value, ...]:
    values = []
    size = SIZES[backend]
    for _ in range(draw.choice(size.inputs)):
        kind = draw.choices(list(INPUT_SHAPES), [5, 5, 4, 1, 5])[0]
        shared = kind == "ids" and draw.random() < 0.3
        values.append(Value("Input", (), kind, {"shared": True} if shared else {}))
    for place, given in enumerate(values.copy()):
        length = draw.randrange(0 if given.kind == "vector" else 1, size.longest + 1)
        _chain(draw, backend, values, place, length)
    for _ in range(draw.choice(size.branches)):
        _chain(draw, backend, values, draw.randrange(len(values)), draw.randrange(1, 3))
    return tuple(values)


def _chain(draw: random.Random, backend: str, values: list[Value], place: int, length: int) -> None:
    """Append a chain of layers to a value."""
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


def _outputs(
    draw: random.Random, backend: str, values: Sequence[Value], dtype: str
) -> tuple[Output, ...]:
    """Add a head to every unused value whose kind allows one; at least one head."""
    used = {place for value in values for place in value.of}
    ends = [place for place in range(len(values)) if place not in used]
    return tuple(_output(draw, backend, place, values[place].kind, dtype) for place in ends)


def _output(draw: random.Random, backend: str, place: int, kind: str, dtype: str) -> Output:
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
        metrics=_metrics(draw, backend, row.targets, kind, dtype),
        sample_weight=draw.random() < 0.25 and row.takes_weights(kind),
    )


def _metrics(
    draw: random.Random, backend: str, targets: str, kind: str, dtype: str
) -> tuple[Any, ...]:
    top_k_fails = backend == "tensorflow" and dtype == "float64"  # in_top_k has no kernel
    rows = [
        row
        for row in heads.METRICS[targets]
        if kind in row.kinds
        and not (row.jumps and dtype.startswith("mixed"))
        and not (top_k_fails and "TopK" in row.metric)
    ]
    chosen = draw.sample(rows, min(draw.choice([0, 1, 1, 2, 3]), len(rows)))
    return tuple(
        (row.metric, drawn(draw, row.options), draw.random() < 0.3 and row.takes_weights)
        for row in chosen
    )
