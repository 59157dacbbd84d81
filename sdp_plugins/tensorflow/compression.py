"""How gradients travel: as they are, or in half precision."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class NoneCompression:
    """As they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What travels, and what ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """The tensor again."""
        return tensor


class FP16Compression:
    """Floats as float16: half the bytes, 11 bits of precision, nothing beyond 65504."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What travels, and the type it had."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """In the type it had."""
        return tf.cast(tensor, context)


class Compression:
    """What ``compression=`` may be."""

    none = NoneCompression
    fp16 = FP16Compression
