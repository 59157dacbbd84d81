"""Starts the ranks of a job of SageMaker's SDK 3, in its containers; not imported, but run there.

The SDK puts this file beside its own drivers, whose functions bring up sshd and wait for the hosts.
It differs from the SDK's driver for MPI in what it starts: ranks on all hosts, as many as the job
has in all (that one starts the first host's number), in an order that every Open MPI keeps, and by
`smddprun`, which sets torchrun's variables.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common.utils import (
    execute_commands,
    get_process_count,
    hyperparameters_to_cli_args,
    write_failure_file,
)
from distributed_drivers.mpi_utils import (
    bootstrap_master_node,
    bootstrap_worker_node,
    get_mpirun_command,
    start_sshd_daemon,
    write_env_vars_to_file,
    write_status_file_to_workers,
)

PLACEMENT = ["--map-by", "slot:oversubscribe", "--bind-to", "none"]
PYTHON = 4  # the command ends in: python -m mpi4py SCRIPT


def command(hosts: list[str]) -> list[str]:
    """The first host's command line."""
    config = json.loads(os.environ["SM_DISTRIBUTED_CONFIG"])
    each = get_process_count(int(config["process_count_per_node"] or 0))
    line = get_mpirun_command(
        host_count=len(hosts),
        host_list=[f"{host}:{each}" for host in hosts],
        num_processes=each * len(hosts),
        additional_options=[*PLACEMENT, *config["custom_mpi_options"].split()],
        entry_script_path=os.environ["SM_ENTRY_SCRIPT"],
    )
    arguments = hyperparameters_to_cli_args(json.loads(os.environ["SM_HPS"]))
    return [*line[:-PYTHON], "smddprun", *line[-PYTHON:], *arguments]


def main() -> None:
    """Be the host that runs mpirun, or one of those that wait for its end."""
    hosts, first = json.loads(os.environ["SM_HOSTS"]), os.environ["SM_MASTER_ADDR"]
    write_env_vars_to_file()
    start_sshd_daemon()
    if os.environ["SM_CURRENT_HOST"] != first:
        bootstrap_worker_node(first)
        return
    others = [host for host in hosts if host != first]
    bootstrap_master_node(others)
    code, failure = execute_commands(command(hosts))
    write_status_file_to_workers(others)
    if code:
        write_failure_file(failure)
        sys.exit(code)


if __name__ == "__main__":
    main()
