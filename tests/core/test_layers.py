"""Each layer imports only what stands below it, and nothing is loaded before it is needed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdp_plugins

ROOT = Path(sdp_plugins.__file__).parent
CSRC = ROOT / "core" / "csrc"

TORCH = {"torch"}
LIGHTNING = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}
EVERY_FRAMEWORK = {*LIGHTNING, "tensorflow", "jax", "keras", "transformers", "accelerate", "mpi4py"}

# Layer: the layers below that it may import, and the frameworks.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "core": (set(), set()),
    "torch": ({"core"}, TORCH),
    "tensorflow": ({"core"}, {"tensorflow"}),
    "jax": ({"core"}, {"jax"}),
    "keras": ({"core", "tensorflow", "jax"}, {"keras", "tensorflow", "torch", "jax"}),
    "lightning": ({"core", "torch"}, LIGHTNING),
    "huggingface": ({"core", "torch"}, {"torch", "transformers", "accelerate"}),
    "launch": ({"core"}, set()),
    "bench": ({"core", "torch", "keras", "launch"}, EVERY_FRAMEWORK),
    "": ({"core", "torch", "lightning", "tensorflow", "keras"}, TORCH),  # _activate
}
STANDARD = set(sys.stdlib_module_names)
# Imports mpi4py in jobs that need it only: see test_nothing_is_loaded_before_it_is_needed.
MPI = "core/internode/mpi_library.py"


def layer_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "csrc" not in path.parts)


def module_of(path: Path) -> list[str]:
    """The package in which a file's relative imports are resolved."""
    return ["sdp_plugins", *path.relative_to(ROOT).parts[:-1]]


def imported(path: Path, tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that a piece of source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module_of(path)
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield ".".join(base)
            yield from (".".join([*base, alias.name]) for alias in node.names)


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: no functions, nothing for type checkers only."""

    class Bare(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit(node)

    return Bare().visit(tree)


# ---- the files ----------------------------------------------------------------------------------


def test_every_layer_imports_only_what_stands_below() -> None:
    wrong = []
    for path in sources():
        layer = layer_of(path)
        assert layer in LAYERS, f"{path}: say in LAYERS what the layer {layer!r} may import"
        below, frameworks = LAYERS[layer]
        for name in imported(path, ast.parse(path.read_text())):
            top, *rest = name.split(".")
            if (
                top == "sdp_plugins"
                and rest
                and rest[0] in LAYERS
                and rest[0] not in (layer, *below)
            ):
                wrong.append(f"{path.relative_to(ROOT)}: layer {name}")
            if top == "mpi4py" and str(path.relative_to(ROOT)) == MPI:
                continue
            if top in EVERY_FRAMEWORK - frameworks:
                wrong.append(f"{path.relative_to(ROOT)}: framework {name}")
            if layer == "core" and top not in STANDARD | {"numpy", "sdp_plugins"}:
                wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert not wrong


def test_modules_of_the_core_import_each_other_in_one_direction() -> None:
    files = [path for path in sources() if layer_of(path) == "core" and path.name != "__init__.py"]
    names = {".".join([*module_of(path), path.stem]): path for path in files}
    below = {
        name: {n for n in imported(path, at_import(ast.parse(path.read_text()))) if n in names}
        for name, path in names.items()
    }
    while leaves := [name for name, needed in below.items() if not needed]:
        below = {name: needed - {*leaves} for name, needed in below.items() if name not in leaves}
    assert not below, f"these import each other: {below}"


def test_only_the_configuration_reads_the_environment() -> None:
    """Launchers prepare the environment of what they start; nobody else looks at it."""
    pattern = re.compile(r"\benviron\b|\bgetenv\b|\bputenv\b")
    readers = {
        str(path.relative_to(ROOT))
        for path in sources()
        if layer_of(path) not in ("launch", "bench", "lightning")
        and pattern.search(without_strings(path.read_text()))
    }
    assert readers == {"core/config.py"}


def without_strings(source: str) -> str:
    """Code without comments, docstrings and other texts."""

    class Mute(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.Constant("") if isinstance(node.value, str) else node

        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
            return ast.Constant("")

    return ast.unparse(ast.fix_missing_locations(Mute().visit(ast.parse(source))))


def test_only_the_bindings_know_python() -> None:
    knowing = {
        path.name
        for path in CSRC.rglob("*.[chi]*")
        if re.search(r"#include\s*<(nanobind|Python\.h|pybind11|torch|mpi)", path.read_text())
    }
    assert knowing == {"bindings.cpp"}


# ---- what is loaded -----------------------------------------------------------------------------

REPORT = """
import json, sys
before = set(sys.modules)
{imports}
loaded = set(sys.modules) - before
maps = open("/proc/self/maps").read()
print(json.dumps([sorted(loaded), maps]))
"""


def load(imports: str) -> tuple[set[str], str]:
    """Modules that a fresh interpreter has loaded, and its memory map."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(imports=imports)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    modules, maps = json.loads(done.stdout)
    return set(modules), maps


USE_THE_CORE = """
import sdp_plugins.core as core
with core.Group.from_env() as group:
    fusion = core.FusionBuffer(group, [(10, core.DType.float32)])
    group.all_reduce(bytearray(10), async_op=True).wait()
"""


def test_the_core_needs_numpy_and_nothing_else() -> None:
    modules, maps = load(USE_THE_CORE)
    tops = {name.split(".")[0] for name in modules} - STANDARD
    assert tops == {"numpy", "sdp_plugins"}
    layers = {name.split(".")[1] for name in modules if name.startswith("sdp_plugins.")}
    assert layers == {"core"}
    assert "_native" in maps
    assert not re.search(r"/lib[^/]*(torch|tensorflow|mpi|mpich|jax)[^/]*\.so", maps)


LAZY = {
    "import sdp_plugins": {"sdp_plugins"},
    "import sdp_plugins._activate": {"sdp_plugins"},
    "import sdp_plugins.core.config": {"sdp_plugins"},
    "import sdp_plugins.core": {"sdp_plugins"},
    "import sdp_plugins.core.errors, sdp_plugins.core.topology": {"sdp_plugins"},
    "import sdp_plugins.launch": {"sdp_plugins"},
}


@pytest.mark.parametrize("imports", LAZY)
def test_nothing_is_loaded_before_it_is_needed(imports: str) -> None:
    """Frameworks import these at their own start: no native module, no NumPy."""
    modules, maps = load(imports)
    assert {name.split(".")[0] for name in modules} - STANDARD == LAZY[imports]
    assert "sdp_plugins.core._native" not in modules and "_native" not in maps


def test_names_of_the_core() -> None:
    """All that is promised is there, and a misspelt name says so."""
    import sdp_plugins.core as core

    assert all(getattr(core, name) is not None for name in core.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Groop'"):
        core.Groop  # noqa: B018
