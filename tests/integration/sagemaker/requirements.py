"""What the tests need of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

TOOLS = ("unshare", "setpriv", "ip", "mpirun", "ssh", "ssh-keygen", "/usr/sbin/sshd")


def reason_against(toolkit: Path) -> str:
    """Why the tests cannot run here; empty if they can.

    Args:
        toolkit: Prefix of the environment of SageMaker's toolkit.
    """
    if not (toolkit / "bin" / "train").exists():
        return "no variable names a toolkit's environment: make test-sagemaker"
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not found (Debian: iproute2 openmpi-bin openssh-server)"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "type", "bridge"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else "this kernel or container allows no bridge"
