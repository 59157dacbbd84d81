"""What the tests need of this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.testbed import sandbox

TOOLS = ("mpirun", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def reason_against(toolkit: Path) -> str:
    """Why the tests cannot run here; empty if they can.

    Args:
        toolkit: Prefix of the environment of SageMaker's toolkit.
    """
    if not (toolkit / "bin" / "train").exists():
        return "no variable names a toolkit's environment: make test-sagemaker"
    if reason := sandbox.reason_against():
        return reason
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: openmpi-bin openssh-server)"
    return ""
