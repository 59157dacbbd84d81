"""Meta kernels in C++ instead of torch's in Python, where there are both.

The ones in Python take ten times as long, and the first of them imports torch._dynamo, for a
second. Shapes are the same. Without this the device would only be slower.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import _meta_registrations as registrations


def prefer_native() -> None:
    """Take back torch's registrations in Python, then repeat those that nothing replaces."""
    name = "_meta_lib_dont_use_me_use_register_meta"
    library = getattr(registrations, name, None)
    if library is None or not getattr(library, "_op_impls", None):
        return
    operators = [key.split("/")[1] for key in library._op_impls]
    library._destroy()
    again = torch.library.Library("aten", "IMPL", "Meta")
    setattr(registrations, name, again)
    for operator in operators:
        packet, _, overload = operator.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
            continue
        kernel = op.py_kernels.get(torch._C.DispatchKey.Meta)
        if kernel is not None:
            with suppress(RuntimeError):  # one that another library has registered meanwhile
                again.impl(op, kernel)
