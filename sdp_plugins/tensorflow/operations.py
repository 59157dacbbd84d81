"""The all_reduce operation for TensorFlow's graphs, compiled at its first use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf

from sdp_plugins.core import _native, native_build
from sdp_plugins.core.native_build import CompileError

_SOURCE = Path(__file__).with_name("csrc") / "all_reduce_op.cc"


@cache
def all_reduce() -> Callable[..., Any]:
    """Return the operation that reduces a fusion buffer.

    Raises:
        CompileError: The operation cannot be compiled or loaded here.
    """
    library = native_build.build(
        _SOURCE,
        tf.version.VERSION,
        tf.sysconfig.get_compile_flags(),
        tf.sysconfig.get_link_flags(),
    )
    try:
        module = tf.load_op_library(str(library))
    except tf.errors.OpError as error:  # symbols that this TensorFlow does not export
        hint = f"Hint: delete {library}"
        raise CompileError(f"{_SOURCE.name}: {error.message}. {hint}") from error
    ctypes.CDLL(str(library)).sdp_use_api(ctypes.c_void_p(_native.api()))
    operation: Callable[..., Any] = module.sdp_all_reduce
    return operation
