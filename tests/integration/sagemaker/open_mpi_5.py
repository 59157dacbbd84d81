"""What a container needs for SageMaker's toolkit to run jobs by Open MPI 5."""

from __future__ import annotations

import os
from pathlib import Path

# The toolkit's --oversubscribe makes it place all ranks on the first host, unless told otherwise;
# and the toolkit's workers wait for a process named orted, which is prted by now.
VARIABLES = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_prte_launch_agent": "orted",
}


def installed(prefix: str, folder: Path) -> dict[str, str]:
    """The environment of an image with an Open MPI 5.

    Args:
        prefix: Where it is.
        folder: An existing one, for the daemon's other name.
    """
    (folder / "orted").symlink_to(Path(prefix) / "bin" / "prted")
    return {
        **VARIABLES,
        "PATH": os.pathsep.join([str(folder), f"{prefix}/bin"]),
        "LD_LIBRARY_PATH": f"{prefix}/lib",
    }
