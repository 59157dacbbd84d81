"""Operations of our own, compiled at their first use, and what XLA makes of them.

TensorFlow's headers that XLA takes are more and change more, so that part is a library of its own:
without it everything else works, outside of what XLA compiles (``jit_compile=True``).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from sdp_plugins.core import native_api, native_build
from sdp_plugins.core.native_build import CompileError

log = logging.getLogger("sdp_plugins.tensorflow")
_SOURCES = Path(__file__).with_name("csrc")
_Operation = Callable[..., Any]


def in_xla() -> bool:
    """Whether what is traced now will be compiled by XLA."""
    if tf.executing_eagerly():
        return False
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


@cache
def all_reduce() -> _Operation:
    """The operation that reduces a fusion buffer.

    Raises:
        CompileError: There is none here.
    """
    module = _load("all_reduce_op.cc", [], [])
    made: _Operation = module.sdp_all_reduce
    return made


@cache
def require() -> _Operation:
    """An assertion that holds in what XLA compiles, and is only for that.

    Once it is there, XLA can compile ``all_reduce``, too.

    Raises:
        CompileError: There is none here.
    """
    all_reduce()
    # Nothing in it takes time but its own compilation.
    compiler = ["-O0", "-DNDEBUG", f"-idirafter{_SOURCES / 'missing'}"]
    module = _load("operations_xla.cc", compiler, ["-l:libtensorflow_cc.so.2"])
    made: _Operation = module.sdp_require
    return made


def _load(source: str, compiler: list[str], linker: list[str]) -> Any:
    library = native_build.build(
        _SOURCES / source,
        tf.version.VERSION,
        [*tf.sysconfig.get_compile_flags(), *compiler],
        [*tf.sysconfig.get_link_flags(), *linker],
    )
    try:
        module = tf.load_op_library(str(library))
    except tf.errors.OpError as error:  # symbols that this TensorFlow does not export
        raise CompileError(f"{source}: {error.message}") from error
    ctypes.CDLL(str(library)).sdp_use_api(ctypes.c_void_p(native_api.api()))
    return module


def available() -> bool:
    """Whether the operation can be used; else says once why not."""
    try:
        all_reduce()
    except CompileError as error:
        log.warning("tensors are copied by NumPy functions, which is slower: %s", error)
        return False
    return True


def xla_available() -> bool:
    """Whether XLA can compile it; else says why not."""
    try:
        require()
    except CompileError as error:
        log.warning("XLA cannot compile collectives: %s", error)
        return False
    return True
