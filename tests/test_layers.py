"""The layers: each imports only what stands below it, and nothing is loaded before it is needed."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import pytest

import sdp_plugins
from tests.ranks import HANG_S
from tests.side_by_side import side_by_side

ROOT = Path(sdp_plugins.__file__).parent
CSRC = ROOT / "core" / "csrc"
NATIVE = "sdp_plugins.core._native"

LIGHTNING = {"torch", "lightning", "pytorch_lightning", "lightning_fabric"}

# Layer: the layers below that it may import, and what it may import of others. The files of a layer
# whose name is a longer path are not those of the shorter.
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "core": (set(), {"numpy"}),
    "torch": ({"core"}, {"torch", "wrapt"}),
    "tensorflow": ({"core"}, {"numpy", "tensorflow"}),
    "jax": ({"core"}, {"numpy", "jax", "jaxlib"}),
    "keras": ({"core", "keras/backends"}, {"numpy", "keras"}),
    "keras/backends": (
        {"core", "keras", "tensorflow", "torch", "jax"},
        {"numpy", "keras", "tensorflow", "torch", "jax"},
    ),
    "lightning": ({"core", "torch"}, LIGHTNING | {"fsspec"}),
    "huggingface": (
        {"core", "torch"},
        {"torch", "wrapt", "transformers", "accelerate", "packaging"},  # which accelerate needs
    ),
    "launch": ({"core", "flight", "trace", "top"}, {"typer"}),
    "doctor": ({"core", "flight", "launch"}, {"packaging", "rich"}),
    # A rank of the measurement: a program such as users write.
    "doctor/speed_rank": ({"core", "torch", "doctor"}, {"numpy", "torch"}),
    # The package itself: importing any layer imports it. It installs the observers of groups, which
    # stand above the core; they are imported when a group needs them.
    "__init__": ({"core", "flight", "trace"}, set()),
    "trace": ({"core"}, set()),
    # Deprecated names of what has moved up; they end with the next release.
    "core/trace": ({"trace"}, set()),
    "trace/__main__": ({"trace", "flight"}, set()),
    "flight": ({"core", "trace"}, set()),
    "top": ({"core", "flight"}, {"rich", "prometheus_client"}),
    "sagemaker": ({"launch"}, {"sagemaker"}),
    # SageMaker's SDK puts it beside modules of its own.
    "sagemaker/driver": (set(), {"common", "distributed_drivers"}),
    "bench": (set(), set()),  # deprecated: it runs benchmarks/, beside the package
    "_activate": ({"core", "torch", "lightning"}, {"wrapt"}),
}
# Imports that only some jobs reach: see `test_nothing_is_loaded_before_it_is_needed`.
EXCEPTIONS = {
    ("core/internode/mpi_library.py", "mpi4py"),
}
# What of the core imports by a name, so that the other tests do not see it, and what that is.
BY_NAME = {
    "core/__init__.py": "parts of itself, at their first use",
    "core/internode/mpi_library.py": "mpi4py",
}

# Who may look at the environment of the process, and why.
ENVIRONMENT = {
    "core/config.py": "the settings",
    "core/environment.py": "hands it to those who take it apart",
    "torch/mpi_environment.py": "sets torchrun's variables for mpirun's ranks",
    "launch/cli.py": "prepares the ranks' environment",
    "launch/hosts/host_job.py": "prepares the ranks' environment",
    "launch/hosts/agent.py": "completes that of the rank which it starts",
    "launch/hosts/host_agents.py": "completes that of the agents which it becomes",
    "launch/smddprun.py": "completes that of the command which it becomes",
    "launch/terminal.py": "knows a notebook by it",
    "sagemaker/process.py": "prepares the ranks' environment",
    "sagemaker/rank.py": "becomes the script, which finds SageMaker's variables",
    "sagemaker/driver/smddp_driver.py": "is told by it what to start",
    "lightning/launcher.py": "marks the processes that Lightning starts",
    "lightning/parent_watch.py": "finds that mark",
    "lightning/cluster_environment.py": "sets torchrun's variables for mpirun's ranks",
}

# Objects that live as long as the process and change, and why no narrower owner will do. What a
# `functools.cache` keeps follows from its arguments.
MODULE_STATE = {
    "core/errors.py: _recent": "C++ frameworks keep only the text of an exception",
    "core/open_groups.py: open_groups": "a signal, and a report of who waits, are the process's",
    "core/regroup/forks.py: _ours": "a fork copies what all listeners of the process have open",
    "flight/flight_recorder.py: flight_recorder": "observes all groups of the process",
    "trace/recorder.py: trace_recorder": "a timeline is the process's",
    "core/internode/leaked.py: _leaked": "memory that MPI may still write must outlive its group",
    "core/internode/spanning_group.py: _open": "groups that are open when MPI is finalised",
    "keras/running_step.py: _running": "what a step's thread is computing: a context variable",
    "keras/backends/torch.py: _seeding": "a lock: torch's generator is the process's",
    "keras/keras_internals.py: _wrapping": "a lock: Keras' functions are the process's",
    "keras/scope.py: _current": "whose scope a thread is in: a context variable",
    "keras/scope.py: _open": "models without a strategy are warned of while one is open",
    "lightning/elastic/strategy.py: _job": "a process is a rank of one job, whatever its Trainers",
    "tensorflow/job.py: current": "SMDDP's API for TensorFlow has a global init()",
    "torch/accelerator/drivers.py: _drivers": "other devices than CUDA's register theirs",
    "torch/group_options.py: default_options": "for Lightning's groups: a context variable",
    "torch/shared_storage.py: _moving": "a lock: two groups may see one storage",
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


def package_of(path: str) -> list[str]:
    """The package in which a file's relative imports are resolved."""
    return ["sdp_plugins", *path.split("/")[:-1]]


def base_of(path: str, node: ast.ImportFrom) -> str:
    """Absolute name of the module from which something is imported."""
    package = package_of(path)
    base = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*base, *([node.module] if node.module else [])])


def imported(path: str, tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that a piece of source imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = base_of(path, node)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_every_file_has_a_layer() -> None:
    without = {path for path in TREES if layer_of(path) is None}
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


def test_files_import_each_other_in_one_direction() -> None:
    """Imports for type checkers and within functions included."""
    names = {
        ".".join([*package_of(path), Path(path).stem]).removesuffix(".__init__"): path
        for path in TREES
    }

    def needed(path: str) -> Iterator[str]:
        """A package of which only a module is imported is not needed itself."""
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = base_of(path, node)
                modules = {f"{base}.{alias.name}" for alias in node.names} & {*names, NATIVE}
                yield from modules
                if len(modules) < len(node.names):
                    yield base

    graph = {name: {*needed(path)} & {*names} - {name} for name, path in names.items()}
    TopologicalSorter(graph).prepare()  # its CycleError names the circle


def test_the_core_imports_nothing_by_name() -> None:
    by_name = {"import_module", "__import__", "importlib", "import_", "exec", "eval"}
    found = {
        path
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if layer_of(path) == "core"
        and (
            (isinstance(node, ast.Name) and node.id in by_name)
            or (isinstance(node, ast.Attribute) and node.attr in by_name)
            or (isinstance(node, ast.alias) and node.name.split(".")[0] in by_name)
        )
    }
    assert found == set(BY_NAME)


CONSTANT = re.compile(r"^_*[A-Z][A-Z0-9_]*$|^__\w+__$|^log$|^app$")
IMMUTABLE = ("frozenset", "getattr", "tuple", "TypeVar", "re.compile")


def test_no_module_keeps_state_but_for_named_reasons() -> None:
    mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.Call)
    found = set()
    for path, tree in TREES.items():
        assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), path
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            value = getattr(node, "value", None)
            if isinstance(value, ast.Call) and ast.unparse(value.func) in IMMUTABLE:
                continue
            for target in targets if isinstance(value, mutable) else ():
                if isinstance(target, ast.Name) and not CONSTANT.match(target.id):
                    found.add(f"{path}: {target.id}")
    assert found == set(MODULE_STATE)


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
    assert knowing == {"bindings.hpp", "bindings.cpp"}
    including = {
        path.name for path in CSRC.rglob("*.[chi]*") if '"bindings.hpp"' in path.read_text()
    }
    assert all(name.startswith("bindings") for name in including)


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
        timeout=HANG_S,
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
    assert layers <= {"core", "flight", "trace"}
    assert "_native" in maps
    assert not re.search(r"/lib[^/]*(torch|tensorflow|mpi|mpich|jax)[^/]*\.so", maps)


WITHOUT_OBSERVERS = (
    """
import sys
from sdp_plugins.core.open_groups import open_groups
open_groups.install(lambda config: ())
sys.modules.update({"sdp_plugins.flight": None, "sdp_plugins.trace": None})
"""
    + USE_THE_CORE
    + """
with core.Group.from_env(timeout_s=30) as group:
    group.abort("no reason")
    try:
        group.barrier()
    except core.SdpError as error:
        assert "no reason" in str(error)
    else:
        raise AssertionError("nothing was raised")
"""
)


def test_the_core_works_without_what_stands_above_it() -> None:
    modules, _ = load(WITHOUT_OBSERVERS)
    layers = {name.split(".")[1] for name in modules if name.startswith("sdp_plugins.")}
    assert layers - {"flight", "trace"} == {"core"}


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


def test_metadata_of_the_installed_packages() -> None:
    for name in ("sdp-plugins", "sdp-plugins-smddp"):
        assert metadata.version(name) == sdp_plugins.__version__
    for group in ("torch.backends", "torch.distributed.backends"):
        (entry,) = (e for e in metadata.entry_points(group=group) if e.name == "sdp_plugins")
        assert callable(entry.load())
    for name, scripts in (
        ("sdp-plugins", {"sdp"}),  # and no name of SMDDP's, whose own wheel may be here
        ("sdp-plugins-smddp", {"smddprun", "smddpsinglenode", "smddpmprun"}),
    ):
        found = {e.name: e for e in metadata.distribution(name).entry_points}
        commands = {e.name for e in found.values() if e.group == "console_scripts"}
        assert commands == scripts
        assert all(callable(found[each].load()) for each in scripts)
