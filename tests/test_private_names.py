"""Private names of other packages are used only where they are listed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdp_plugins
from sdp_plugins.torch import internals

ROOT = Path(sdp_plugins.__file__).parent


def in_lists_of(path: str) -> set[str]:
    """Names in a file's lists; Keras and TensorFlow take long to import."""
    constants = (node for node in ast.walk(ast.parse((ROOT / path).read_text())))
    texts = {str(node.value) for node in constants if isinstance(node, ast.Constant)}
    names = texts | {part for text in texts for part in text.split(".")}
    return {name for name in names if IS_PRIVATE.fullmatch(name) or PRIVATE_PATH.fullmatch(name)}


DOCUMENTED = {"_exit", "_getframe"}  # of os and sys
IS_PRIVATE = re.compile(r"_[a-zA-Z]\w*")
# Of modules, some of which have no underscore.
PRIVATE_PATH = re.compile(
    r"(torch|lightning|accelerate|transformers|keras|tensorflow|jax)\.[\w.]*\b_[a-zA-Z][\w.]*"
    r"|(keras\.src|tensorflow\.python|tensorflow\.core|jax\.interpreters)\b.*"
)
# Files, and the private names of others that they may use.
LISTED: dict[str, set[str]] = {
    "torch": {
        *(part for path in internals.NAMES for part in path.split(".") if part.startswith("_")),
        *internals.OVERRIDDEN,
        *internals.FRAMES,
        *internals.MODULES,
    },
    # Looked for before they are used, and tested with the versions of pyproject.toml.
    "lightning": {
        "_call_children_scripts",
        "_configure_launcher",
        "_signal_connector",
        "_start_method",
        "_sigterm_notifier_fn",
        # Of a Trainer and its loops, for smddp_elastic.
        "_batches_that_stepped",
        "_should_accumulate",
        "_callback_metrics",
        "_checkpoint_connector",
        "_combined_loader",
        "_current_fx",
        "_current_fx_name",
        "_data_fetcher",
        "_first_loop_iter",
        "_last_time_checked",
        "_loaded_checkpoint",
        "_logged_metrics",
        "_logger_connector",
        "_module_mode",
        "_progress_bar_metrics",
        "_results",
        "_should_check_val_fx",
    },
    # `Upstream` compares each with what is known of it.
    "huggingface": {
        "_optimizers",
        "_prepare_backend",
        "_save_optimizer_and_scheduler",
        "_shared_state",
        "_wrap_model",
    },
    "keras": {
        *in_lists_of("keras/keras_internals.py"),
        *in_lists_of("keras/backends/torch_internals.py"),
    },
    "tensorflow": in_lists_of("tensorflow/tf_internals.py"),
    "jax": set(),
}
PRIVATE_MODULES = {
    "torch/internals.py",
    "keras/keras_internals.py",
    "tensorflow/tf_internals.py",
}
OURS = re.compile(r"_(smddp|sdp)(_\w+)?")  # attributes that this package gives to others' objects


def trees(layer: str) -> dict[str, ast.Module]:
    paths = (ROOT / layer).rglob("*.py")
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a file gives to its own functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield from [str(node.slice.value)] if isinstance(node.slice, ast.Constant) else []


def used(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Private names of attributes, and whether only another package can mean them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and IS_PRIVATE.fullmatch(node.attr):
            yield node.attr, ast.unparse(node.value) == "super()"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "keras.src":
            yield "keras.src", True
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PRIVATE_PATH.fullmatch(node.value):
                yield node.value, True
            elif IS_PRIVATE.fullmatch(node.value):  # for getattr(), or a frame's name
                yield node.value, False


def unlisted(layer: str, files: dict[str, ast.Module]) -> set[tuple[str, str]]:
    own = {name for tree in files.values() for name in defined(tree)} | DOCUMENTED
    return {
        (path, name)
        for path, tree in files.items()
        for name, of_others in used(tree)
        if name not in LISTED[layer] and (of_others or name not in own)
        if not OURS.fullmatch(name)
    }


def private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        for module in modules:
            if not module.startswith("sdp_plugins") and (
                re.search(r"(^|\.)_[a-zA-Z]", module) or PRIVATE_PATH.fullmatch(module)
            ):
                yield module


@pytest.mark.parametrize("layer", LISTED)
def test_private_names_are_listed(layer: str) -> None:
    assert unlisted(layer, trees(layer)) == set()


@pytest.mark.parametrize("layer", LISTED)
def test_private_modules_are_imported_in_one_place(layer: str) -> None:
    found = {
        (path, module)
        for path, tree in trees(layer).items()
        if path not in PRIVATE_MODULES
        for module in private_imports(tree)
    }
    assert found == set()


def members_of_keras(files: dict[str, ast.Module]) -> set[str]:
    """What is used of the modules of Keras that `keras_internals` imports."""
    chain = re.compile(r"keras_internals\.[a-z_]+\.(\w+)")
    nodes = (node for tree in files.values() for node in ast.walk(tree))
    texts = (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute))
    return {match[1] for text in texts if (match := chain.fullmatch(text))}


def test_members_of_keras_are_listed() -> None:
    files = trees("keras")
    listed = files.pop("keras/keras_internals.py")
    texts = {node.value for node in ast.walk(listed) if isinstance(node, ast.Constant)}
    assert "train_validation_split" in members_of_keras(files)
    assert members_of_keras(files) - texts == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("storage._cdatum", "_cdatum"),
        ("getattr(trainer, '_moved')", "_moved"),
        ("hook('torch._inductor.config')", "torch._inductor.config"),
        ("import keras\nkeras.src.trainers", "keras.src"),
        ("class A:\n    def _apply_all(self): super()._apply_all()", "_apply_all"),
    ],
)
def test_an_unlisted_name_is_found(source: str, name: str) -> None:
    assert unlisted("torch", {"new.py": ast.parse(source)}) == {("new.py", name)}


def test_a_private_module_is_found() -> None:
    source = "import torch._dynamo, json\nfrom torch._C import _functions\nfrom .other import _own"
    assert set(private_imports(ast.parse(source))) == {"torch._dynamo", "torch._C._functions"}
    source = (
        "from keras import src, ops\nimport tensorflow.python.distribute\nfrom jax._src import a"
    )
    found = {"keras.src", "tensorflow.python.distribute", "jax._src.a"}
    assert set(private_imports(ast.parse(source))) == found
