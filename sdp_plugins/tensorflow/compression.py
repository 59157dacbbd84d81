"""Gradient compression: none, or half precision."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class NoneCompression:
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and the context for ``decompress``."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Return the tensor unchanged."""
        return tensor


class FP16Compression:
    """Sends floats as float16: half the bytes, 11 bits of precision, no values beyond 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send, and its original dtype."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Convert the tensor to its original dtype."""
        return tf.cast(tensor, context)


class Compression:
    """The values of ``compression=``."""

    none = NoneCompression
    fp16 = FP16Compression
