"""Faults of the installation, of variables and of folders."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from sdp_plugins import __version__
from sdp_plugins.core.launcher_variables import OPEN_MPI
from sdp_plugins.doctor.finding import Status
from sdp_plugins.doctor.imported import openmp_libraries
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.doctor.report import facts
from tests.doctor.machines import (
    MS_NOEXEC,
    changed,
    doctor,
    findings,
    healthy,
    importing,
    install,
    install_ourselves,
    needs_namespaces,
    own_shared_memory,
    problem,
    real_problem,
    with_variables,
    write,
)

# ---- what a real child imports -------------------------------------------------------------------


def without_torch(**environment: str) -> Machine:
    """This machine, as if torch were not installed: a child imports the rest only."""
    machine = Machine(environment={**os.environ, **environment}, given_ranks=2)
    vars(machine)["packages"] = {}
    return machine


def test_this_installation() -> None:
    machine = Machine(given_ranks=2)
    assert not [f for f in findings(machine, "native-module") if f.is_problem]
    assert not [f for f in findings(machine, "torch-backend") if f.is_problem]
    assert not [f for f in findings(machine, "smdistributed") if f.is_problem]
    assert not [f for f in findings(machine, "installation") if f.is_problem]


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "unset TORCH_DEVICE_BACKEND_AUTOLOAD"),
        ({"SDP_AUTOLOAD": "off"}, "unset SDP_AUTOLOAD"),
    ],
    ids=["torch", "ours"],
)
def test_activation_is_off(variables: dict[str, str], remedy: str) -> None:
    found = real_problem("torch-backend", **variables)
    assert found["status"] == "error" and found["remedy"].startswith(remedy)


# A program's `sitecustomize` runs before everything else: it breaks what the child imports.
@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("sys.modules['sdp_plugins.core._native'] = None", "cannot be imported (ModuleNotFound"),
        (
            "import types\nmodule = types.ModuleType('_native')\nmodule.__file__ = '/old.so'\n"
            "sys.modules['sdp_plugins.core._native'] = module",
            "/old.so is of another version: it has no ",
        ),
        (
            "import os\nclass Finder:\n    def find_spec(self, name, *_):\n"
            "        if name == 'sdp_plugins.core._native': os.kill(os.getpid(), 4)\n"
            "sys.meta_path.insert(0, Finder())",
            "was killed by SIGILL",
        ),
    ],
    ids=["missing", "another version", "crash"],
)
def test_the_native_module(tmp_path: Path, program: str, text: str) -> None:
    write(tmp_path, {"sitecustomize.py": f"import sys\n{program}\n"})
    found = problem(without_torch(PYTHONPATH=str(tmp_path)), "native-module")
    assert found.status is Status.error and text in found.text
    assert found.remedy.startswith("pip install --force-reinstall")


def test_another_owner_of_the_names(tmp_path: Path) -> None:
    """The import hook of an editable installation is asked before folders, and knows the names."""
    write(tmp_path / "others", {"smddpcommon/__init__.py": ""})
    hook = (
        "import sys\nfrom importlib.machinery import PathFinder\nclass Finder:\n"
        "    def find_spec(self, name, *_):\n        if name == 'smddpcommon':\n"
        f"            return PathFinder.find_spec(name, ['{tmp_path}/others'])\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    write(tmp_path, {"sitecustomize.py": hook})
    found = problem(without_torch(PYTHONPATH=str(tmp_path)), "smdistributed")
    assert f"`import smddpcommon` finds {tmp_path}/others/smddpcommon/" in found.text
    assert "pip uninstall smdistributed-dataparallel" in found.remedy


def test_a_python_that_does_not_start(tmp_path: Path) -> None:
    machine = Machine(given_ranks=2, python=tmp_path / "python")
    assert "cannot be started" in problem(machine, "native-module").text


def test_openmp_libraries_in_a_memory_map() -> None:
    maps = "\n".join(
        f"7f00-7f01 r-xp 00000000 08:01 17                 {path}"
        for path in (
            *("/site/torch/lib/libgomp-a34b3233.so.1.0.0", "/site/torch/lib/libtorch.so"),
            *("/conda/lib/libiomp5.so", "/conda/lib/libiomp5.so", "/usr/lib/libompitrace.so"),
        )
    )
    found = openmp_libraries(maps)
    assert found == ["/conda/lib/libiomp5.so", "/site/torch/lib/libgomp-a34b3233.so.1.0.0"]


@pytest.mark.parametrize(
    ("imports", "text", "remedy"),
    [
        ({"error": "ImportError: no libtorch.so"}, "no libtorch.so", "pip install"),
        ({"version": "2.13.0", "available": False, "registered": False}, "without", "PyPI"),
        ({"version": "2.13.0", "registered": False, "reason": "boom"}, "(boom)", "pip install"),
        ({"version": "2.13.0", "registered": False, "reason": ""}, "entry point", "pip install"),
    ],
    ids=["broken", "without distributed", "fails", "no entry point"],
)
def test_torch(tmp_path: Path, imports: dict[str, object], text: str, remedy: str) -> None:
    found = problem(importing(healthy(tmp_path), torch=imports), "torch-backend")
    assert text in found.text and remedy in found.remedy


def test_torch_crashes(tmp_path: Path) -> None:
    machine = importing(healthy(tmp_path), failed="was killed by SIGSEGV")
    assert "was killed by SIGSEGV" in problem(machine, "torch-backend").text


# ---- packages and the interpreter ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "version", "remedy"),
    [
        ("torch", "2.12.1+cpu", "pip install 'torch<2.16,>=2.13'"),
        ("torch", "2.16.0", "pip install 'torch<2.16,>=2.13'"),
        ("numpy", "3.0.1", "pip install 'numpy<3,>=1.24'"),
        ("tensorflow", "2.17.0", "pip install 'tensorflow<2.22,>=2.18'"),
        ("tensorflow-cpu", "2.17.0", "pip install 'tensorflow-cpu<2.22,>=2.18'"),
        ("mpi4py", "3.1.6", "pip install 'mpi4py>=4.0'"),
    ],
)
def test_a_version(tmp_path: Path, name: str, version: str, remedy: str) -> None:
    machine = healthy(tmp_path)
    for old in (tmp_path / "site").glob(f"{name}-*"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    install(tmp_path / "site", name, version)
    found = problem(machine, "package-versions")
    assert f"{name} {version} is installed" in found.text and found.remedy == remedy
    assert facts(machine)["versions"][name] == version


def test_a_newer_torch_that_fits(tmp_path: Path) -> None:
    site = tmp_path / "other"
    install_ourselves(site, __version__)
    install(site, "torch", "2.14.0.dev20260801+cpu")
    install(site, "numpy", "1.26.4")
    machine = changed(healthy(tmp_path), path=(str(site),))
    assert [f.status for f in findings(machine, "package-versions")] == [Status.ok] * 2


def test_no_numpy(tmp_path: Path) -> None:
    site = tmp_path / "other"
    install_ourselves(site, __version__)
    found = problem(changed(healthy(tmp_path), path=(str(site),)), "package-versions")
    assert found.status is Status.error and found.text.startswith("numpy is not installed")
    assert found.remedy == "pip install 'numpy<3,>=1.24'"


@pytest.mark.parametrize("fault", ["version", "entry points", "metadata"])
def test_an_incomplete_installation(tmp_path: Path, fault: str) -> None:
    site = tmp_path / "other"
    site.mkdir()
    if fault != "metadata":
        version = "0.0.1" if fault == "version" else __version__
        install_ourselves(site, version, entry_points=fault != "entry points")
    machine = changed(healthy(tmp_path), path=(str(site),))
    found = problem(machine, "installation")
    texts = {
        "version": "are of 0.0.1, the code is",
        "entry points": "no entry point in torch.backends and torch.distributed.backends",
        "metadata": "is not installed",
    }
    assert texts[fault] in found.text
    assert found.remedy.startswith("pip install --force-reinstall --no-deps -e CLONE")


@pytest.mark.parametrize(
    ("head", "text"),
    [
        (b"\x7fELF\x01\x01\x01", "a 32-bit program"),
        (b"\x7fELF\x02\x01\x01" + bytes(500) + b"/lib/ld-musl-x86_64.so.1\0", "uses musl"),
    ],
    ids=["32 bits", "musl"],
)
def test_an_interpreter(tmp_path: Path, head: bytes, text: str) -> None:
    machine = healthy(tmp_path)
    machine.python.write_bytes(head)
    assert text in problem(machine, "interpreter").text


def test_a_version_of_python(tmp_path: Path) -> None:
    site = tmp_path / "other"
    install(site, "sdp-plugins", __version__, "Requires-Python: >=3.99")
    machine = changed(healthy(tmp_path), path=(str(site),))
    assert problem(machine, "python-version").remedy.endswith("with Python >=3.99")


# ---- files beside the program, and folders -------------------------------------------------------


def test_a_file_beside_the_program_hides_a_framework(tmp_path: Path) -> None:
    write(tmp_path, {"numpy.py": "raise RuntimeError('the wrong one')\n"})
    found = real_problem("shadowing-modules", cwd=tmp_path)
    assert found["text"].endswith(f"imports {tmp_path}/numpy.py")
    assert found["remedy"].startswith("rename numpy.py")


def test_a_folder_beside_the_script_hides_a_framework(tmp_path: Path) -> None:
    write(tmp_path, {"job/train.py": "", "job/keras/__init__.py": "", "job/torch/data.txt": ""})
    write(tmp_path, {"work/numpy.py": ""})  # Python does not import from the current folder then
    machine = changed(healthy(tmp_path), script=tmp_path / "job/train.py")
    found = problem(machine, "shadowing-modules")  # torch is no package, and hides nothing
    assert found.remedy.startswith("rename keras,")


def test_no_temporary_folder(tmp_path: Path) -> None:
    found = real_problem("temporary-folder", TMPDIR=str(tmp_path / "missing"))
    assert found["remedy"].startswith("export TMPDIR=/tmp")


def test_no_working_folder(tmp_path: Path) -> None:
    machine = changed(healthy(tmp_path), folder=tmp_path / "elsewhere")
    assert problem(machine, "working-folder").remedy.startswith(f"mkdir -p {tmp_path}/elsewhere")


def with_jax(folder: Path, **variables: str) -> Machine:
    machine = healthy(folder)
    install(folder / "site", "jax", "0.6.0")
    return with_variables(machine, **variables)


def test_no_folder_for_compiled_operations(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = problem(with_jax(tmp_path, SDP_CACHE=f"{tmp_path}/file/x"), "compiled-operations")
    assert "cannot be written" in found.text and found.remedy.startswith("export SDP_CACHE=")


@needs_namespaces
def test_a_folder_from_which_nothing_is_loaded() -> None:
    setup = partial(own_shared_memory, b"size=1g", MS_NOEXEC)
    found = real_problem("compiled-operations", setup, SDP_CACHE="/dev/shm/cache")
    assert "noexec" in found["text"] and found["remedy"].startswith("export SDP_CACHE=")


def test_no_compiler(tmp_path: Path) -> None:
    found = problem(with_jax(tmp_path, CXX="no-such-compiler"), "compiled-operations")
    assert "no compiler no-such-compiler" in found.text
    assert found.remedy.startswith("apt-get install g++")
    write(tmp_path, {"cache/sdp_plugins/all_reduce-0.so": ""})  # has been compiled before
    machine = with_jax(tmp_path, CXX="no-such-compiler")
    assert not findings(machine, "compiled-operations")[0].is_problem


# ---- variables -----------------------------------------------------------------------------------


def test_a_value_that_cannot_be_read() -> None:
    found = real_problem("settings", SDP_TIMEOUT_S="soon")
    assert "SDP_TIMEOUT_S='soon'" in found["text"] and "or unset it" in found["remedy"]


def test_a_variable_that_has_no_effect_any_more(tmp_path: Path) -> None:
    machine = with_variables(healthy(tmp_path), SDP_CALIBRATION="x")
    assert problem(machine, "settings").remedy == "unset SDP_CALIBRATION"


def test_a_misspelt_variable() -> None:
    found = real_problem("unknown-variables", SDP_TIMEOUT="30")
    assert found["remedy"] == (
        "export SDP_TIMEOUT_S=..., if that is what was meant; unset SDP_TIMEOUT"
    )


def test_two_launchers_that_disagree() -> None:
    rank, size = OPEN_MPI.rank[0], OPEN_MPI.size[0]
    variables = {"RANK": "0", "WORLD_SIZE": "2", rank: "1", size: "2", "MASTER_PORT": "1"}
    found = real_problem("launchers", **variables)
    assert "contradict each other" in found["text"] and "unset the stale ones" in found["remedy"]


def test_half_of_a_launcher() -> None:
    found = real_problem("launchers", WORLD_SIZE="2")
    assert found["text"] == "WORLD_SIZE is set but RANK is not"
    assert found["remedy"].startswith("start all ranks with one launcher")


@pytest.mark.parametrize("name", ["/opt/libno-such.so.2", "libno-such.so.2"])
def test_a_preloaded_library_that_is_not_there(name: str) -> None:
    found = problem(with_variables(Machine(), LD_PRELOAD=f"libc.so.6:{name}"), "preloaded")
    assert f"names {name}, which no rank loads (cannot open shared object file)" in found.text
    assert found.remedy.startswith("unset LD_PRELOAD")


@pytest.mark.parametrize("name", ["libm.so.6", "/$LIB/libm.so.6 libm.so.6"])
def test_a_preloaded_library(name: str) -> None:
    found = findings(with_variables(Machine(), LD_PRELOAD=name), "preloaded")
    assert [f.text for f in found] == [f"LD_PRELOAD loads {name}"]


def test_the_command_is_not_fooled_by_files_of_the_current_folder(tmp_path: Path) -> None:
    names = ("rich", "packaging", "json", "argparse", "torch", "numpy")
    write(tmp_path, {f"{name}.py": "raise RuntimeError('the wrong one')\n" for name in names})
    done = doctor("--check", "shadowing-modules", cwd=tmp_path)
    assert done.returncode == 1 and "RuntimeError" not in done.stderr, done.stderr
    assert f"imports {tmp_path}/torch.py" in done.stdout
