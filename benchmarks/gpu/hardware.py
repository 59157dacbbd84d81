"""What nvidia-smi says of the GPU."""

from __future__ import annotations

import subprocess

FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "PCIe generation, current": "pcie.link.gen.current",
    "PCIe generation, most": "pcie.link.gen.max",
    "PCIe lanes, current": "pcie.link.width.current",
    "PCIe lanes, most": "pcie.link.width.max",
}
LIMIT_S = 10.0


def gpu() -> dict[str, str]:
    """Return the facts that can be read about the first GPU; an idle link may be slowed down."""
    line = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": f"not readable ({type(error).__name__})"}
    cells = done.stdout.splitlines()[0].split(", ") if done.stdout else []
    return {f"GPU {name}": cell for name, cell in zip(FIELDS, cells, strict=False)}
