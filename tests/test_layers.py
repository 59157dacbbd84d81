"""The layers: each part of the package imports only what stands below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import sdp_plugins

PACKAGE = Path(__file__).parents[1] / "sdp_plugins"
OTHERS = {
    "torch",
    "tensorflow",
    "jax",
    "keras",
    "lightning",
    "pytorch_lightning",
    "mpi4py",
    "numpy",
}

# Part -> what it may import besides the standard library and itself. `torch` here is the framework,
# `sdp_plugins.torch` our plug-in.
LAYERS = {
    "core": {"numpy"},
    "launch": {"typer"},
    "torch": {"torch", "wrapt", "sdp_plugins.core", "sdp_plugins._activate"},
    "lightning": {
        "torch",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "sdp_plugins.core",
        "sdp_plugins.torch",
    },
    "tensorflow": {"tensorflow", "numpy", "sdp_plugins.core"},
    "jax": {"jax", "numpy", "sdp_plugins.core"},
    "keras": {"keras", "numpy", "sdp_plugins.core"},
    "keras/backends": {
        "keras",
        "numpy",
        "tensorflow",
        "torch",
        "jax",
        "sdp_plugins.core",
        "sdp_plugins.tensorflow",
        "sdp_plugins.jax",
    },
}
# Who may look at the environment of the process, and why.
ENVIRONMENT = {
    "core/config.py": "the settings",
    "launch/supervise.py": "prepares the ranks' environment",
    "bench/keras_task.py": "sets what Keras and TensorFlow read when they are imported",
    "bench/job.py": "prepares the ranks' environment",
    "bench/cluster/program.py": "prepares the ranks' environment",
    "bench/cluster/sandbox.py": "marks the process that it starts in the sandbox",
    "lightning/launcher.py": "marks the processes that Lightning starts",
    "lightning/parent_watch.py": "finds that mark",
    "lightning/environment.py": "takes the address that the launcher has set",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def imports(tree: ast.Module) -> Iterator[str]:
    """Absolute names of imported modules; our own with two parts, others with one."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # relative: stays in its part
                continue
            names = [str(node.module)]
            if node.module == "sdp_plugins":
                names = [f"sdp_plugins.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            yield ".".join(parts[:2]) if parts[0] == "sdp_plugins" else parts[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_what_is_below(layer: str) -> None:
    allowed = LAYERS[layer] | {f"sdp_plugins.{layer}", "sdp_plugins.__version__"}
    found = {
        (path, name)
        for path, tree in sources()
        if path.startswith(f"{layer}/") and (layer == "keras") <= ("/backends/" not in path)
        for name in imports(tree)
        if name not in allowed and name not in sys.stdlib_module_names
    }
    assert found <= {("core/internode/mpi_library.py", "mpi4py")}  # only in jobs that need it


@pytest.mark.parametrize("framework", ["tensorflow", "torch", "jax"])
def test_a_backend_of_keras_imports_one_framework(framework: str) -> None:
    (tree,) = (tree for path, tree in sources() if path == f"keras/backends/{framework}.py")
    assert set(imports(tree)) & {"tensorflow", "torch", "jax"} <= {framework}


def test_nothing_imports_the_command_line() -> None:
    tops = {"sdp_plugins.launch", "sdp_plugins.bench"}
    for path, tree in sources():
        if path.split("/")[0] not in ("launch", "bench"):
            assert not tops & set(imports(tree)), path


def test_only_settings_and_launchers_look_at_the_environment() -> None:
    found = {
        path
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    }
    assert found <= set(ENVIRONMENT)


@pytest.mark.parametrize(
    ("module", "may"),
    [("sdp_plugins", set()), ("sdp_plugins.launch.cli", set()), ("sdp_plugins.core", {"numpy"})],
)
def test_import_loads_no_framework(module: str, may: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert set(done.stdout.split()) & OTHERS <= may


def test_metadata_of_the_installed_package() -> None:
    assert metadata.version("sdp-plugins") == sdp_plugins.__version__
    for group in ("torch.backends", "torch.distributed.backends"):
        (entry,) = (e for e in metadata.entry_points(group=group) if e.name == "sdp_plugins")
        assert callable(entry.load())
    (script,) = (e for e in metadata.entry_points(group="console_scripts") if e.name == "sdp")
    assert callable(script.load())
