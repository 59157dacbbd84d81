"""The installed packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import Distribution

from sdp_plugins import __version__
from sdp_plugins.doctor.finding import Finding, error, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine

CHECKED = (
    *("torch", "lightning", "pytorch-lightning", "keras", "tensorflow-cpu", "jax"),
    *("transformers", "accelerate", "numpy", "wrapt", "mpi4py"),
)
# Other packages that bring the same modules.
SAME = {"tensorflow-cpu": ("tensorflow-cpu", "tensorflow", "tensorflow-intel")}
_GROUPS = ("torch.backends", "torch.distributed.backends")
REINSTALL = "pip install --force-reinstall --no-deps -e CLONE, or the wheel of this version"


def package_versions(machine: Machine) -> Iterator[Finding]:
    """The frameworks' versions are those for which the package was made."""
    from packaging.specifiers import SpecifierSet

    package = machine.installed("sdp-plugins")
    if package is None:
        yield skipped("sdp-plugins has no metadata")
        return
    for name, allowed, extra in _ranges(package):
        found = machine.installed(*SAME.get(name, (name,)))
        if found is None:
            if not extra:
                text = f"{name} is not installed, and sdp-plugins needs it"
                yield error(text, f"pip install '{name}{allowed}'")
            continue
        installed = f"{found.metadata['Name']} {found.version}"
        if SpecifierSet(allowed).contains(found.version, prereleases=True):
            yield ok(f"{installed} is {allowed}")
        else:
            what = f"sdp-plugins[{extra}]" if extra else "sdp-plugins"
            yield warning(
                f"{installed} is installed, and {what} was made for {allowed}",
                f"pip install '{found.metadata['Name']}{allowed}'",
            )


def _ranges(package: Distribution) -> Iterator[tuple[str, str, str]]:
    """Name, range and extra of the requirements that are checked."""
    from packaging.requirements import Requirement

    for text in package.requires or ():
        requirement = Requirement(text)
        extra = re.search(r"""extra == ['"]([^'"]+)""", str(requirement.marker or ""))
        if requirement.name in CHECKED and requirement.specifier:
            yield requirement.name, str(requirement.specifier), extra[1] if extra else ""


def installation(machine: Machine) -> Iterator[Finding]:
    """The package's metadata are those of the code that runs, and have its entry points."""
    package = machine.installed("sdp-plugins")
    if package is None:
        yield error(
            "sdp-plugins is not installed: its code runs from a folder, and `import torch` does "
            "not find it",
            REINSTALL,
        )
        return
    if package.version != __version__:
        yield error(
            f"the metadata of sdp-plugins are of {package.version}, the code is {__version__}",
            REINSTALL,
        )
    groups = {e.group for e in package.entry_points if e.name == "sdp_plugins"}
    if missing := [group for group in _GROUPS if group not in groups]:
        yield error(
            f"sdp-plugins has no entry point in {' and '.join(missing)}, so `import torch` does "
            "not register smddp",
            REINSTALL,
        )
    elif package.version == __version__:
        yield ok(f"sdp-plugins {__version__} is installed with its entry points")
