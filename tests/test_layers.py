"""The layers: each imports only what stands below it, and nothing is loaded before it is needed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import sdp_plugins
from tests.side_by_side import side_by_side

ROOT = Path(sdp_plugins.__file__).parent
CSRC = ROOT / "core" / "csrc"

LIGHTNING = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}

# Layer: the layers below that it may import, and what it may import of others. The files of a layer
# whose name is a longer path are not those of the shorter.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "core": (set(), {"numpy"}),
    "torch": ({"core", "_activate"}, {"torch", "wrapt"}),
    "tensorflow": ({"core"}, {"numpy", "tensorflow"}),
    "jax": ({"core"}, {"numpy", "jax"}),
    "keras": ({"core", "keras/backends"}, {"numpy", "keras"}),
    "keras/backends": (
        {"core", "keras", "tensorflow", "jax"},
        {"numpy", "keras", "tensorflow", "torch", "jax"},
    ),
    "lightning": ({"core", "torch"}, LIGHTNING),
    "huggingface": ({"core", "torch"}, {"torch", "wrapt", "transformers", "accelerate"}),
    "launch": ({"core"}, {"typer"}),
    "trace": ({"core"}, set()),
    "sagemaker": ({"launch"}, {"sagemaker"}),
    # SageMaker's SDK puts it beside modules of its own.
    "sagemaker/driver": (set(), {"common", "distributed_drivers"}),
    "bench": (
        {"core", "torch", "keras", "launch"},
        {"numpy", "torch", "tensorflow", "jax", "keras", "mpi4py", "typer", "rich", "matplotlib"},
    ),
    "_activate": ({"core", "torch", "lightning", "huggingface"}, {"torch", "wrapt"}),
}
# Imports that only some jobs reach: see `test_nothing_is_loaded_before_it_is_needed`.
EXCEPTIONS = {("core/internode/mpi_library.py", "mpi4py")}

# Who may look at the environment of the process, and why.
ENVIRONMENT = {
    "core/config.py": "the settings",
    "core/environment.py": "hands it to those who take it apart",
    "torch/launched_by_mpi.py": "sets torchrun's variables where mpirun has set its own only",
    "launch/local_ranks.py": "prepares the ranks' environment",
    "launch/hosts/request.py": "prepares the ranks' environment",
    "launch/hosts/agent.py": "completes that of the rank which it starts",
    "launch/smddprun.py": "completes that of the command which it becomes",
    "sagemaker/process.py": "prepares the ranks' environment",
    "sagemaker/rank.py": "becomes the script, which finds SageMaker's variables",
    "sagemaker/driver/smddp_driver.py": "is told by it what to start",
    "bench/keras_task.py": "sets what Keras and TensorFlow read when they are imported",
    "bench/job.py": "prepares the ranks' environment",
    "bench/cluster/program.py": "prepares the ranks' environment",
    "bench/cluster/sandbox.py": "marks the process that it starts in the sandbox",
    "lightning/launcher.py": "marks the processes that Lightning starts",
    "lightning/parent_watch.py": "finds that mark",
    "lightning/environment.py": "takes the address that the launcher has set",
}

# ---- the files ----------------------------------------------------------------------------------

TREES = {
    path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
    for path in sorted(ROOT.rglob("*.py"))
}


def layer_of(path: str) -> str | None:
    """The layer with the longest name to which a file, or a module's path, belongs."""
    found = [name for name in LAYERS if re.match(rf"{name}(/|\.py$|$)", path)]
    return max(found, key=len, default=None)


def module_of(path: str) -> list[str]:
    """The package in which a file's relative imports are resolved."""
    return ["sdp_plugins", *path.split("/")[:-1]]


def imported(path: str, tree: ast.AST) -> Iterator[str]:
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

    return Bare().visit(ast.parse(ast.unparse(tree)))


def test_every_file_has_a_layer() -> None:
    without = {path for path in TREES if layer_of(path) is None} - {"__init__.py"}
    assert not without, "say in LAYERS what these may import"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_stands_below(layer: str) -> None:
    below, packages = LAYERS[layer]
    wrong = set()
    for path, tree in TREES.items():
        for name in imported(path, tree) if layer_of(path) == layer else ():
            top, *rest = name.split(".")
            if top == "sdp_plugins":
                other = layer_of("/".join(rest))
                if other not in (None, layer, *below):
                    wrong.add((path, name))
            elif top not in packages and top not in sys.stdlib_module_names:
                wrong.add((path, top))
    assert wrong - EXCEPTIONS == set()


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax"])
def test_a_backend_of_keras_imports_one_framework(framework: str) -> None:
    path = f"keras/backends/{framework}.py"
    tops = {name.split(".")[0] for name in imported(path, TREES[path])}
    assert tops & {"tensorflow", "torch", "jax"} <= {framework}


def test_modules_of_the_core_import_each_other_in_one_direction() -> None:
    files = [path for path in TREES if layer_of(path) == "core" and "__init__" not in path]
    names = {".".join([*module_of(path), Path(path).stem]): path for path in files}
    below = {
        name: {n for n in imported(path, at_import(TREES[path])) if n in names}
        for name, path in names.items()
    }
    while leaves := [name for name, needed in below.items() if not needed]:
        below = {name: needed - {*leaves} for name, needed in below.items() if name not in leaves}
    assert not below, f"these import each other: {below}"


def test_only_settings_and_launchers_look_at_the_environment() -> None:
    names = {"environ", "environb", "getenv", "putenv"}
    readers = {
        path
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.Name) and node.id in names)
        or (isinstance(node, ast.alias) and node.name in names)
    }
    assert readers == set(ENVIRONMENT)


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


def others(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names)


USE_THE_CORE = """
import sdp_plugins.core as core
with core.Group.from_env() as group:
    fusion = core.FusionBuffer(group, [(10, core.DType.float32)])
    group.all_reduce(bytearray(10), async_op=True).wait()
"""


def test_the_core_needs_numpy_and_nothing_else() -> None:
    modules, maps = load(USE_THE_CORE)
    assert others(modules) == {"numpy", "sdp_plugins"}
    layers = {name.split(".")[1] for name in modules if name.startswith("sdp_plugins.")}
    assert layers == {"core"}
    assert "_native" in maps
    assert not re.search(r"/lib[^/]*(torch|tensorflow|mpi|mpich|jax)[^/]*\.so", maps)


# Frameworks import these at their own start: no native module, no NumPy.
LAZY = (
    "sdp_plugins",
    "sdp_plugins._activate",
    "sdp_plugins.core.config",
    "sdp_plugins.core",
    "sdp_plugins.core.errors, sdp_plugins.core.topology",
    "sdp_plugins.launch",
    "sdp_plugins.launch.smddprun",
    "smdistributed.dataparallel.exceptions",
    "smdistributed.dataparallel, smddpcommon",
    "sdp_plugins.sagemaker",
)


def test_nothing_is_loaded_before_it_is_needed() -> None:
    for names, (modules, maps) in zip(
        LAZY, side_by_side(load, [(f"import {names}",) for names in LAZY], at_once=2), strict=True
    ):
        assert others(modules) <= {"sdp_plugins", "smdistributed", "smddpcommon"}, names
        assert "sdp_plugins.core._native" not in modules, names
        assert "_native" not in maps, names


def test_the_command_line_loads_no_framework() -> None:
    modules, maps = load("import sdp_plugins.launch.cli")
    frameworks = set().union(*(packages for _, packages in LAYERS.values())) - {"typer", "rich"}
    assert not others(modules) & frameworks
    assert "_native" not in maps


# ---- what is promised ---------------------------------------------------------------------------


def test_names_of_the_core() -> None:
    """All that is promised is there, and a misspelt name says so."""
    import sdp_plugins.core as core

    assert all(getattr(core, name) is not None for name in core.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Groop'"):
        core.Groop  # noqa: B018


def test_metadata_of_the_installed_package() -> None:
    assert metadata.version("sdp-plugins") == sdp_plugins.__version__
    for group in ("torch.backends", "torch.distributed.backends"):
        (entry,) = (e for e in metadata.entry_points(group=group) if e.name == "sdp_plugins")
        assert callable(entry.load())
    scripts = {e.name: e for e in metadata.entry_points(group="console_scripts")}
    for name in ("sdp", "smddprun", "smddpsinglenode", "smddpmprun"):
        assert callable(scripts[name].load())
