"""The strategy of a job, for tests of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tensorflow as tf

import sdp_plugins.tensorflow as sdp
from sdp_plugins.tensorflow import SMDDPStrategy

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN
modes = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])


@contextmanager
def strategy_of_job() -> Iterator[Any]:
    try:
        yield SMDDPStrategy()
    finally:
        sdp.shutdown()


def traced(function: Callable[..., Any], in_graph: bool) -> Callable[..., Any]:
    return tf.function(function) if in_graph else function
