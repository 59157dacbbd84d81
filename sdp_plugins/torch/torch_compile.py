"""Keeping this package out of what torch.compile traces."""

from __future__ import annotations

from typing import Any

import wrapt


def skip_when_tracing() -> None:
    """Have torch.compile run our frames instead of compiling them.

    DDP's C++ calls the group's methods in the middle of compiled code, where every Python frame is
    compiled, and fails on what it cannot trace. The decorator torch.compiler.disable would cost
    microseconds in each call and import the compiler in every program; this hook waits until
    somebody else imports it.
    """
    wrapt.register_post_import_hook(_skip, "torch._dynamo.trace_rules")


def _skip(trace_rules: Any) -> None:
    trace_rules.add("sdp_plugins")
