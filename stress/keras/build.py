"""Builds and compiles models from plans; runs in a rank, with Keras."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
from keras import layers, ops

from stress.keras import heads, own
from stress.keras.layers import IDS, INPUT_SHAPES
from stress.keras.plan import Output, Plan, Value

Options = dict[str, Any]
Make = Callable[[Any, Options, str], Any]


def model_of(plan: Plan) -> tuple[Any, list[tuple[int | None, ...]]]:
    """Return the model, not compiled, and the shapes of its outputs."""
    made: list[Any] = []
    for place, value in enumerate(plan.values):
        made.append(_value(value, made, f"v{place}"))
    outputs = [
        head(output, made[output.of], plan, f"out{i}") for i, output in enumerate(plan.outputs)
    ]
    shapes = [tuple(output.shape) for output in outputs]
    inputs = structure(plan, "x", [made[place] for place in plan.inputs])
    inner = keras.Model(inputs, structure(plan, "out", outputs), name="model")
    if plan.form == "nested":
        again = keras.tree.map_structure(
            lambda tensor: keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=tensor.name),
            inputs,
        )
        return keras.Model(again, inner(again), name="outer"), shapes
    return (own.Subclassed(inner) if plan.form == "subclass" else inner), shapes


def structure(plan: Plan, prefix: str, members: list[Any]) -> Any:
    """Return inputs or outputs in the structure that the model uses."""
    if plan.fit["structure"] == "dict":
        return {f"{prefix}{i}": member for i, member in enumerate(members)}
    return members[0] if len(members) == 1 else members


def _value(value: Value, made: list[Any], name: str) -> Any:
    if value.layer == "Input":
        dtype = "int32" if value.kind == "ids" else None
        return keras.Input(INPUT_SHAPES[value.kind], dtype=dtype, name=name)
    options = dict(value.options)
    x, *others = (made[place] for place in value.of)
    if value.layer in MERGING:
        return getattr(layers, value.layer)(name=name, **options)([x, fitted(others[0], x)])
    if value.layer in ("Attention", "AdditiveAttention"):
        key = others[0] if others else x
        key = key if key.shape[-1] == x.shape[-1] else layers.Dense(x.shape[-1])(key)
        return getattr(layers, value.layer)(name=name, **options)([x, key])
    if value.layer in SPECIAL:
        return SPECIAL[value.layer](x, options, name)
    if value.layer in OWN:
        return OWN[value.layer](name=name, **options)(x)
    if value.layer in ("Embedding", "ReversibleEmbedding"):
        options["input_dim"] = IDS
    if value.layer == "CategoryEncoding":
        options["num_tokens"] = IDS
    layer = getattr(layers, value.layer)(name=name, **options)
    if value.frozen:
        layer.trainable = False
    return layer(x)


def head(output: Output, x: Any, plan: Plan, name: str) -> Any:
    """Return the head's outputs, from which a loss is computed."""
    if "int" in str(x.dtype):
        x = layers.Embedding(IDS, 4)(x)
    if output.kind == "vector" and len(x.shape) > 2:
        x = layers.Flatten()(x)
    width, dtype = heads.WIDTH, "float32" if plan.dtype.startswith("mixed") else None
    if output.activation == "unit":
        return layers.UnitNormalization(name=name, dtype=dtype)(layers.Dense(width)(x))
    return layers.Dense(width, output.activation, name=name, dtype=dtype)(x)


def fitted(x: Any, like: Any) -> Any:
    """Return another value in the shape of `like`."""
    if x.shape == like.shape:
        return x
    if len(x.shape) > 2:
        x = ops.mean(x, axis=tuple(range(1, len(x.shape) - 1)))
    x = layers.Dense(like.shape[-1])(x)
    x = layers.Reshape((1,) * (len(like.shape) - 2) + (like.shape[-1],))(x)
    return ops.add(x, ops.zeros_like(like))


# ---- layers that need more than a name and options ----------------------------------------------

MERGING = {"Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate", "Dot"}
OWN = {
    "scale_and_shift": own.ScaleAndShift,
    "expanded_position": own.ExpandedPosition,
    "reshaped_weight": own.ReshapedWeight,
    "transposed_weight": own.TransposedWeight,
    "split_weight": own.SplitWeight,
    "broadcast_weight": own.BroadcastWeight,
    "position_embedding": own.PositionEmbedding,
    "tied_embedding": own.TiedEmbedding,
}


def _group_normalization(x: Any, options: Options, name: str) -> Any:
    groups = options.pop("groups")
    groups = groups if groups == -1 else math.gcd(groups, x.shape[-1])
    return layers.GroupNormalization(groups, name=name, **options)(x)


def _prelu(x: Any, options: Options, name: str) -> Any:
    shared = tuple(range(1, len(x.shape) - 1)) or None
    return layers.PReLU(shared_axes=shared, name=name, **options)(x)


def _spectral_normalization(x: Any, options: Options, name: str) -> Any:
    layer = layers.Dense(options.pop("units"))
    return layers.SpectralNormalization(layer, name=name, **options)(x)


def _low_rank_dense(x: Any, options: Options, name: str) -> Any:
    layer = layers.Dense(options["units"], name=name)
    layer.build(x.shape)
    layer.enable_lora(options["rank"], a_initializer="he_uniform", b_initializer="he_uniform")
    return layer(x)


def _twice(x: Any, options: Options, name: str) -> Any:
    layer = layers.Dense(x.shape[-1], name=name, **options)
    return layer(layer(x))


def _einsum_dense(x: Any, options: Options, name: str) -> Any:
    units, bias = options.pop("units"), "d" if options.pop("bias") else None
    axes = "ab" if len(x.shape) > 2 else "a"
    return layers.EinsumDense(
        f"{axes}c,cd->{axes}d", (*x.shape[1:-1], units), bias_axes=bias, name=name, **options
    )(x)


def _bidirectional(x: Any, options: Options, name: str) -> Any:
    layer = getattr(layers, options.pop("layer"))(options.pop("units"))
    return layers.Bidirectional(layer, name=name, **options)(x)


def _stacked_cells(x: Any, options: Options, name: str) -> Any:
    cells = [layers.LSTMCell(options["units"]), layers.GRUCell(options["units"])]
    return layers.RNN(layers.StackedRNNCells(cells), name=name)(x)


def _time_distributed_dense(x: Any, options: Options, name: str) -> Any:
    return layers.TimeDistributed(layers.Dense(**options), name=name)(x)


def _time_distributed_convolution(x: Any, options: Options, name: str) -> Any:
    layer = layers.Conv2D(options["filters"], 2, padding="same")
    return layers.TimeDistributed(layer, name=name)(x)


def _self_attention(x: Any, options: Options, name: str) -> Any:
    causal = options.pop("causal")
    attention = layers.MultiHeadAttention(name=name, **options)
    return attention(x, x, use_causal_mask=causal)


def _grouped_query_attention(x: Any, options: Options, name: str) -> Any:
    return layers.GroupQueryAttention(name=name, **options)(x, x)


def _transformer(x: Any, options: Options, name: str) -> Any:
    width = options.pop("width")
    causal = options.pop("causal")
    attention = layers.MultiHeadAttention(name=name, **options)
    x = layers.LayerNormalization()(layers.Add()([x, attention(x, x, use_causal_mask=causal)]))
    wide = layers.Dense(width, "gelu")(x)
    return layers.LayerNormalization()(layers.Add()([x, layers.Dense(x.shape[-1])(wide)]))


def _shared_embedding(x: Any, options: Options, name: str) -> Any:
    embedding = layers.Embedding(IDS, name=name, **options)
    return layers.Add()([embedding(x), embedding(ops.subtract(IDS - 1, x))])


def _fold(x: Any, options: Options, name: str) -> Any:
    steps = 2 if x.shape[-1] % 2 == 0 else 1
    return layers.Reshape((steps, x.shape[-1] // steps), name=name)(x)


def _expand_dims(x: Any, options: Options, name: str) -> Any:
    return ops.expand_dims(x, 1)


def _add_channel(x: Any, options: Options, name: str) -> Any:
    return ops.expand_dims(x, -1)


def _rows_as_steps(x: Any, options: Options, name: str) -> Any:
    return layers.Reshape((x.shape[1], x.shape[2] * x.shape[3]), name=name)(x)


def _frames(x: Any, options: Options, name: str) -> Any:
    return ops.stack([x, ops.flip(x, axis=1)], axis=1)


def _u_net(x: Any, options: Options, name: str) -> Any:
    filters = options["filters"]
    down = layers.Conv2D(filters, 3, padding="same", name=name)(x)
    down = layers.GroupNormalization(2, epsilon=0.1)(down)
    low = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(down)
    up = layers.Conv2DTranspose(filters, 3, strides=2, padding="same")(low)
    up = layers.Resizing(x.shape[1], x.shape[2])(up) if up.shape != down.shape else up
    return layers.Conv2D(filters, 1)(layers.Concatenate()([down, up]))


SPECIAL: Mapping[str, Make] = {
    "GroupNormalization": _group_normalization,
    "PReLU": _prelu,
    "spectral_normalization": _spectral_normalization,
    "low_rank_dense": _low_rank_dense,
    "twice": _twice,
    "einsum_dense": _einsum_dense,
    "bidirectional": _bidirectional,
    "stacked_cells": _stacked_cells,
    "time_distributed_dense": _time_distributed_dense,
    "time_distributed_convolution": _time_distributed_convolution,
    "self_attention": _self_attention,
    "grouped_query_attention": _grouped_query_attention,
    "transformer": _transformer,
    "shared_embedding": _shared_embedding,
    "fold": _fold,
    "expand_dims": _expand_dims,
    "add_channel": _add_channel,
    "rows_as_steps": _rows_as_steps,
    "frames": _frames,
    "u_net": _u_net,
}

# ---- compile ------------------------------------------------------------------------------------


def compile_options(plan: Plan, loss_factor: float = 1.0) -> dict[str, Any]:
    """Return the arguments of `compile`."""
    fit, outputs = plan.fit, plan.outputs
    options = {
        "optimizer": optimizer_of(plan),
        "loss": structure(plan, "out", [loss_of(output) for output in outputs]),
        "loss_weights": structure(plan, "out", [o.weight * loss_factor for o in outputs]),
    }
    for name, is_weighted in (("metrics", False), ("weighted_metrics", True)):
        chosen = [
            [metric_of(metric, dict(o)) for metric, o, weighted in output.metrics
             if weighted == is_weighted]
            for output in outputs
        ]  # fmt: skip
        if any(chosen):
            options[name] = structure(plan, "out", chosen)
    for name in ("steps_per_execution", "run_eagerly"):
        if name in fit:
            options[name] = fit[name]
    return options


def optimizer_of(plan: Plan) -> Any:
    """Return an optimizer, possibly with a schedule."""
    options = dict(plan.optimizer)
    kind = getattr(keras.optimizers, options.pop("name"))
    if schedule := options.pop("schedule", None):
        schedule = dict(schedule)
        make = getattr(keras.optimizers.schedules, schedule.pop("name"))
        if "values" not in schedule:
            schedule["initial_learning_rate"] = options["learning_rate"]
        options["learning_rate"] = make(**schedule)
    return kind(**options)


def loss_of(output: Output) -> Any:
    """Return a loss object or a function."""
    options = dict(output.options)
    if isinstance(options.get("axis"), list):
        options["axis"] = tuple(options["axis"])
    if output.loss == "own_loss":
        return own.squares
    if output.loss == "own_loss_object":
        return own.Quartic(**options)
    return getattr(keras.losses, output.loss)(**options)


def metric_of(name: str, options: dict[str, Any]) -> Any:
    """Return a metric object, a function, a loss object or a name."""
    if name == "accuracy":
        return name
    if name == "loss_object":
        return getattr(keras.losses, options["loss"])(name="object")
    if name == "own_function":
        return own.spread
    if name.startswith("own_"):
        return {"own_maximum": own.Maximum, "own_sum": own.WeighedSum}[name](name=name)
    return getattr(keras.metrics, name)(**options)
