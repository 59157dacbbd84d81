"""The layers of random models: input kinds, output kinds, and values of options.

A model's value has one of five kinds, by its shape without the batch: `vector` (features),
`sequence` (steps, features), `image` (height, width, features), `video` (time and an image), `ids`
(steps, integers). The sizes are small, and no option depends on them, so a plan needs no shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("vector", "sequence", "image", "video", "ids")
INPUT_SHAPES = {
    "vector": (6,),
    "sequence": (5, 4),
    "image": (6, 6, 2),
    "video": (3, 4, 4, 2),
    "ids": (5,),
}
IDS = 12
"""Ids are below this."""


@dataclass(frozen=True)
class Row:
    """A layer of the table.

    Attributes:
        layer: Its name in `keras.layers`; lower case: a function of `build.py`.
        takes: The kinds of value that it accepts.
        makes: The kind of its output; `same`: that of its input.
        options: The values to draw each option from.
        weight: The relative frequency in the draw among the layers for the same kind.
        backends: The backends that have it and give the same result as one process.
    """

    layer: str
    takes: Sequence[str]
    makes: str
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    weight: int = 2
    backends: Sequence[str] = ("tensorflow", "torch", "jax")


V, S, I, M, D = (("vector",), ("sequence",), ("image",), ("video",), ("ids",))  # noqa: E741
DENSE = ("vector", "sequence", "image", "video")
TF = ("tensorflow",)

ACTIVATION = (None, None, "relu", "tanh", "gelu", "silu", "softplus", "elu", "selu", "mish")
WIDTH = (4, 8)
REGULARIZER = (None,) * 8 + ("l1", "l2", "L1L2")
CONSTRAINT = (None,) * 10 + ("max_norm", "non_neg", "unit_norm")
KERNEL = {
    "activation": ACTIVATION,
    "use_bias": (True, True, False),
    "kernel_regularizer": REGULARIZER,
    "kernel_constraint": CONSTRAINT,
}
POINTWISE = {
    **KERNEL,
    "bias_regularizer": REGULARIZER,
    "activity_regularizer": (None,) * 12 + ("l2", "l1"),
}
BY_DEPTH = {
    "depth_multiplier": (1, 2),
    "strides": (1, 1, 2),
    "padding": ("same",),
    "activation": ACTIVATION,
    "use_bias": (True, False),
}
CONVOLUTION = {**KERNEL, "filters": WIDTH, "kernel_size": (1, 2, 3), "padding": ("same",)}
STRIDED = {**CONVOLUTION, "strides": (1, 1, 2)}
SEPARABLE = {**BY_DEPTH, "filters": WIDTH, "kernel_size": (2, 3)}
POOL = {"pool_size": (2,), "padding": ("same",)}
RECURRENT = {
    "units": WIDTH,
    "activation": ("tanh", "relu", "sigmoid"),
    "use_bias": (True, True, False),
    "go_backwards": (False, False, True),
    "unroll": (False, False, False, True),
    "kernel_regularizer": REGULARIZER,
    "recurrent_constraint": CONSTRAINT,
}
GRU = {**RECURRENT, "reset_after": (True, False)}
ONE, ALL = {"return_sequences": (False,)}, {"return_sequences": (True,)}
HEADS = {"num_heads": (1, 2), "key_dim": (2, 4), "use_bias": (True, False), "causal": (False, True)}
AFFINE = {"center": (True, True, False), "scale": (True, True, False), "epsilon": (1e-3, 0.1)}
EMBEDDING = {
    "output_dim": WIDTH,
    "embeddings_regularizer": (None,) * 6 + ("l2",),
    "embeddings_constraint": (None,) * 8 + ("max_norm",),
}
MASKED = {**EMBEDDING, "mask_zero": (False, False, True)}

LAYERS: tuple[Row, ...] = (
    Row("Dense", V, "same", {**POINTWISE, "units": WIDTH}, 8),
    Row("Dense", ("sequence", "image", "video"), "same", {**POINTWISE, "units": WIDTH}, 3),
    Row("einsum_dense", ("vector", "sequence"), "same", {"units": WIDTH, "bias": (True, False),
        "activation": ACTIVATION}),
    Row("low_rank_dense", V, "same", {"units": WIDTH, "rank": (1, 2)}, 1),
    Row("twice", V, "same", {"activation": ACTIVATION}, 3),
    Row("twice", S, "same", {"activation": ACTIVATION}),
    # BatchNormalization, which normalizes over rows, equals one process on TensorFlow only.
    Row("LayerNormalization", DENSE, "same", AFFINE, 3),
    Row("GroupNormalization", DENSE, "same", {**AFFINE, "groups": (1, 2, 4, -1)}, 5),
    Row("RMSNormalization", DENSE, "same", {"epsilon": (1e-3, 0.1)}),
    Row("UnitNormalization", DENSE, "same", {}, 1),
    Row("spectral_normalization", V, "same", {"units": WIDTH, "power_iterations": (1, 2)}, 1),
    Row("Normalization", DENSE, "same", {"mean": (0.3,), "variance": (1.7,)}, 1),
    Row("BatchNormalization", DENSE, "same", {"trainable": (False,)}, 1),
    Row("BatchNormalization", ("vector", "image", "video"), "same", {**AFFINE,
        "synchronized": (True,), "momentum": (0.7, 0.9), "epsilon": (0.1,)}, 3, TF),
    # Activations
    Row("ReLU", DENSE, "same", {"negative_slope": (0.0, 0.1), "threshold": (0.0, 0.2)}, 1),
    Row("LeakyReLU", DENSE, "same", {"negative_slope": (0.1, 0.3)}, 1),
    Row("ELU", DENSE, "same", {"alpha": (0.5, 1.0)}, 1),
    Row("PReLU", DENSE, "same", {"alpha_initializer": ("ones", "zeros")}),
    Row("Softmax", DENSE, "same", {}, 1),
    Row("Activation", DENSE, "same", {"activation": tuple(filter(None, ACTIVATION))}, 1),
    Row("ActivityRegularization", DENSE, "same", {"l1": (0.0, 0.01), "l2": (0.01,)}, 1),
    Row("Rescaling", DENSE, "same", {"scale": (0.5, 2.0), "offset": (0.0, 0.1)}, 1),
    Row("Identity", DENSE, "same", {}, 1),
    # Variables of the layer's own, with different gradient paths in autograd
    Row("scale_and_shift", DENSE, "same", {}, 3),
    Row("expanded_position", S, "same", {"axis": (0,)}, 4),
    Row("reshaped_weight", V, "same", {"units": WIDTH}, 3),
    Row("transposed_weight", V, "same", {"units": WIDTH}, 2),
    Row("split_weight", V, "same", {"units": WIDTH}, 2),
    Row("broadcast_weight", DENSE, "same", {}, 2),
    # Merging with an earlier value of a fitted shape
    Row("Add", DENSE, "same", {"merge": (True,)}),
    Row("Subtract", DENSE, "same", {"merge": (True,)}, 1),
    Row("Multiply", DENSE, "same", {"merge": (True,)}),
    Row("Average", DENSE, "same", {"merge": (True,)}, 1),
    Row("Maximum", DENSE, "same", {"merge": (True,)}, 1),
    Row("Minimum", DENSE, "same", {"merge": (True,)}, 1),
    Row("Concatenate", DENSE, "same", {"merge": (True,)}),
    Row("Dot", V, "same", {"merge": (True,), "axes": (1,), "normalize": (False, True)}, 1),
    # Shapes
    Row("RepeatVector", V, "sequence", {"n": (2, 3)}, 1),
    Row("fold", V, "sequence", {}),
    Row("expand_dims", V, "sequence", {}),
    Row("Permute", S, "same", {"dims": ((2, 1),)}, 1),
    Row("Permute", I, "same", {"dims": ((2, 1, 3), (3, 1, 2))}, 1),
    Row("add_channel", S, "image", {}, 1),
    Row("rows_as_steps", I, "sequence", {}, 2),
    Row("frames", I, "video", {}, 1),
    Row("Flatten", ("sequence", "image", "video"), "vector", {}, 2),
    # Sequences
    Row("Conv1D", S, "same", {**CONVOLUTION, "strides": (1, 2), "padding": ("same", "causal")}, 3),
    Row("Conv1D", S, "same", {**CONVOLUTION, "dilation_rate": (2,)}, 1),
    Row("SeparableConv1D", S, "same", SEPARABLE, 1),
    Row("DepthwiseConv1D", S, "same", {**BY_DEPTH, "kernel_size": (2, 3)}, 1),
    Row("Conv1DTranspose", S, "same", STRIDED, 1),
    Row("MaxPooling1D", S, "same", POOL, 1),
    Row("AveragePooling1D", S, "same", POOL, 1),
    Row("AdaptiveAveragePooling1D", S, "same", {"output_size": (2, 3)}, 1),
    Row("UpSampling1D", S, "same", {"size": (2,)}, 1),
    Row("ZeroPadding1D", S, "same", {"padding": (1, (0, 2))}, 1),
    Row("GlobalAveragePooling1D", S, "vector", {"keepdims": (False,)}, 2),
    Row("GlobalMaxPooling1D", S, "vector", {}, 2),
    Row("LSTM", S, "vector", {**RECURRENT, **ONE, "unit_forget_bias": (True, False)}, 2),
    Row("LSTM", S, "same", {**RECURRENT, **ALL}, 1),
    Row("GRU", S, "vector", {**GRU, **ONE}, 2),
    Row("GRU", S, "same", {**GRU, **ALL}, 1),
    Row("SimpleRNN", S, "vector", {**RECURRENT, **ONE}, 2),
    Row("SimpleRNN", S, "same", {**RECURRENT, **ALL}, 1),
    Row("bidirectional", S, "vector", {"layer": ("LSTM", "GRU", "SimpleRNN"), "units": (4,),
        "merge_mode": ("concat", "sum", "mul", "ave")}, 1),
    Row("stacked_cells", S, "vector", {"units": WIDTH}, 1),
    Row("time_distributed_dense", S, "same", {"units": WIDTH, "activation": ACTIVATION}, 1),
    Row("self_attention", S, "same", {**HEADS, "flash_attention": (None, False)}, 3),
    Row("grouped_query_attention", S, "same", {"head_dim": (2, 4), "num_query_heads": (2, 4),
        "num_key_value_heads": (1, 2), "use_bias": (True, False)}),
    Row("Attention", S, "same", {"pair": (True,), "use_scale": (True, False),
        "score_mode": ("dot", "concat")}),
    Row("AdditiveAttention", S, "same", {"pair": (True,), "use_scale": (True, False)}),
    Row("position_embedding", S, "same", {}, 5),
    Row("transformer", S, "same", {**HEADS, "width": (8,)}, 2),
    # Images
    Row("Conv2D", I, "same", STRIDED, 4),
    Row("Conv2D", I, "same", {**CONVOLUTION, "dilation_rate": (2,)}, 1),
    Row("SeparableConv2D", I, "same", SEPARABLE, 1),
    Row("DepthwiseConv2D", I, "same", {**BY_DEPTH, "kernel_size": (2, 3)}, 1),
    Row("Conv2DTranspose", I, "same", STRIDED, 1),
    Row("MaxPooling2D", I, "same", POOL, 1),
    Row("AveragePooling2D", I, "same", POOL, 1),
    Row("AdaptiveMaxPooling2D", I, "same", {"output_size": (2,)}, 1),
    Row("UpSampling2D", I, "same", {"size": (2,), "interpolation": ("nearest", "bilinear")}, 1),
    Row("ZeroPadding2D", I, "same", {"padding": (1,)}, 1),
    Row("GlobalAveragePooling2D", I, "vector", {}, 3),
    Row("GlobalMaxPooling2D", I, "vector", {}, 2),
    Row("u_net", I, "same", {"filters": WIDTH}, 1),
    # Videos
    Row("Conv3D", M, "same", CONVOLUTION, 2),
    Row("Conv3DTranspose", M, "same", CONVOLUTION, 1),
    Row("MaxPooling3D", M, "same", POOL, 1),
    Row("AveragePooling3D", M, "same", POOL, 1),
    Row("UpSampling3D", M, "same", {"size": (2,)}, 1),
    Row("GlobalAveragePooling3D", M, "vector", {}, 2),
    Row("GlobalMaxPooling3D", M, "vector", {}, 1),
    Row("ConvLSTM2D", M, "image", {**ONE, "filters": (4,), "kernel_size": (2,),
        "padding": ("same",)}, 2),
    Row("time_distributed_convolution", M, "same", {"filters": WIDTH}, 1),
    # Ids
    Row("Embedding", D, "sequence", MASKED, 8),
    Row("shared_embedding", D, "sequence", EMBEDDING, 4),
    Row("tied_embedding", D, "sequence", EMBEDDING, 3),
    Row("ReversibleEmbedding", D, "sequence", {"output_dim": WIDTH, "tie_weights": (True, False)}),
    Row("CategoryEncoding", D, "vector", {"output_mode": ("multi_hot", "count")}, 2),
)  # fmt: skip


def rows_for(kind: str, backend: str) -> list[Row]:
    """Return the layers that accept a value of a kind."""
    return [row for row in LAYERS if kind in row.takes and backend in row.backends]
