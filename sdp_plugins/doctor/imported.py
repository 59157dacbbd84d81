"""The child of `importing`: imports one thing after the other, and prints what it finds.

Each result is printed at once, so that those before a crash are known.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sdp_plugins
from sdp_plugins.doctor.importing import MARK

NATIVE = "sdp_plugins.core._native"
SMDDP_NAMES = ("smdistributed.dataparallel", "smddpcommon")
_OPENMP = re.compile(r"/lib(?:gomp|iomp5|omp)\b[^/]*\.so")


def main() -> None:
    """Entry point; the argument `torch` adds torch."""
    tell(home=str(Path(str(sdp_plugins.__file__)).parents[1]))
    tell(strangers={name: place for name in SMDDP_NAMES if (place := stranger(name))})
    attempt("numpy", lambda: importlib.import_module("numpy").__version__)
    attempt("native", native_module)
    if "torch" in sys.argv:
        attempt("torch", torch_and_backend)
    tell(openmp=openmp_libraries(Path("/proc/self/maps").read_text()))


def tell(**found: object) -> None:
    """Print results."""
    print(MARK + json.dumps(found), flush=True)


def attempt(step: str, find: Callable[[], object]) -> None:
    """Print what a step finds, or the exception that ends it."""
    tell(step=step)
    try:
        tell(**{step: find()})
    except Exception as error:
        tell(**{step: {"error": f"{type(error).__name__}: {error}".splitlines()[0]}})


def native_module() -> dict[str, Any]:
    """Where the native module is, and which names of its stub it lacks: it is of another build."""
    native = importlib.import_module(NATIVE)
    stub = Path(str(importlib.import_module("sdp_plugins.core").__file__)).with_name("_native.pyi")
    missing = [name for name in _names(ast.parse(stub.read_text())) if not _has(native, name)]
    return {"path": native.__file__, "missing": missing}


def _names(tree: ast.Module) -> Iterator[str]:
    """The functions and classes of a stub, and the classes' methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (
                f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)
            )


def _has(module: Any, path: str) -> bool:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module is not None


def torch_and_backend() -> dict[str, Any]:
    """The version of torch, and whether importing it has registered smddp."""
    torch = importlib.import_module("torch")
    dist = importlib.import_module("torch.distributed")
    if not dist.is_available():
        return {"version": torch.__version__, "available": False, "registered": False}
    registered = "smddp" in dist.Backend.backend_list
    reason = "" if registered else _reason()
    return {"version": torch.__version__, "registered": registered, "reason": reason}


def _reason() -> str:
    """Why smddp is not registered, if its registration fails; empty if it was not tried."""
    try:
        importlib.import_module("sdp_plugins.torch")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stranger(name: str) -> str | None:
    """The file of a module that has a name of SMDDP and is another package's; else None."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package that would contain it
        return None
    if found is None or not found.origin:
        return None
    ours = "sdp_plugins" in Path(found.origin).read_text(errors="replace")
    return None if ours else found.origin


def openmp_libraries(maps: str) -> list[str]:
    """The OpenMP libraries in a memory map."""
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if _OPENMP.search(line)}
    return sorted({str(Path(path).resolve()) for path in paths})
