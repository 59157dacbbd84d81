"""`distributed=SMDDP()` for the ModelTrainer of SageMaker's SDK 3, which lacks SMDDP."""

from __future__ import annotations

from pathlib import Path

from sagemaker.train.distributed import DistributedConfig


class SMDDP(DistributedConfig):
    """Starts ranks for `init_process_group("smddp")` on all hosts of a job.

    The container needs this package, Open MPI, sshd with a key that all hosts share, and paramiko:
    see docs/sagemaker.md.

    Attributes:
        process_count_per_node: Ranks on each host; None: the number of GPUs, or 1.
        custom_mpi_options: More options for mpirun, as one string.
    """

    process_count_per_node: int | None = None
    custom_mpi_options: str = ""

    @property
    def driver_dir(self) -> str:
        """The folder that the SDK puts into the container."""
        return str(Path(__file__).parent / "driver")

    @property
    def driver_script(self) -> str:
        """The script that runs there."""
        return "smddp_driver.py"
