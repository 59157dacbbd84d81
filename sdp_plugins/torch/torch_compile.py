"""Exclusion of this package from tracing by torch.compile."""

from __future__ import annotations

from typing import Any

import wrapt


def skip_when_tracing() -> None:
    """Make torch.compile run this package's frames instead of compiling them.

    DDP's C++ calls the group's methods in the middle of compiled code. torch.compile compiles every
    Python frame there and fails on those that it cannot trace. The decorator torch.compiler.disable
    would cost microseconds in each call and import the compiler in every program; this hook takes
    effect when another module imports it.
    """
    wrapt.register_post_import_hook(_skip, "torch._dynamo.trace_rules")


def _skip(trace_rules: Any) -> None:
    trace_rules.add("sdp_plugins")
