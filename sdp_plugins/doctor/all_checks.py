"""All checks by subject, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from sdp_plugins.doctor.checks import (
    activation,
    folders,
    huge_pages,
    jobs,
    kernel,
    limits,
    memory,
    mpi,
    network,
    numa,
    packages,
    processors,
    python_build,
    variables,
)
from sdp_plugins.doctor.finding import Finding, skipped
from sdp_plugins.doctor.machine import Machine

Check = Callable[[Machine], Iterator[Finding]]

SUBJECTS: Mapping[str, Sequence[Check]] = {
    "Installation": (
        *(python_build.interpreter, python_build.python_version),
        *(packages.installation, packages.package_versions, folders.shadowing_modules),
        *(activation.native_module, activation.torch_backend, activation.smdistributed),
        *(folders.compiled_operations, folders.working_folder),
    ),
    "Environment variables": (
        *(variables.settings, variables.unknown_variables, variables.launchers),
        variables.preloaded,
    ),
    "Processors and threads": (
        *(processors.threads, processors.engine_threads, processors.ranks_per_core),
        *(processors.cpu_quota, processors.core_binding, processors.frequency, processors.load),
        *(processors.instruction_set, activation.openmp_runtimes, jobs.other_jobs),
        *(numa.numa_binding, numa.numa_memory),
    ),
    "Memory": (
        *(huge_pages.transparent_huge_pages, huge_pages.malloc_huge_pages),
        *(memory.available_memory, memory.swap, memory.overcommit, memory.mappings),
        *(memory.dev_shm, folders.temporary_folder),
    ),
    "Kernel and limits": (
        *(kernel.shared_memory, kernel.end_of_processes, kernel.local_sockets, kernel.packets),
        *(kernel.page_map, limits.open_files, limits.file_size, limits.address_space),
        *(limits.processes, limits.locked_memory),
    ),
    "Network and MPI": (
        *(network.loopback, network.host_name, network.master_address, network.gloo_interface),
        *(network.peer_names, mpi.mpirun, mpi.mpirun_place, mpi.mpi4py_library, mpi.mpi_packages),
    ),
}


def name_of(check: Check) -> str:
    """A check's name."""
    return check.__name__.replace("_", "-")


NAMES = tuple(name_of(check) for checks in SUBJECTS.values() for check in checks)


def run_checks(machine: Machine, only: Collection[str] = ()) -> Iterator[Finding]:
    """Run the checks, or only those with these names."""
    for subject, checks in SUBJECTS.items():
        for check in checks:
            name = name_of(check)
            if not only or name in only:
                for finding in _run(check, machine):
                    yield replace(finding, subject=subject, check=name)


def _run(check: Check, machine: Machine) -> Iterator[Finding]:
    """Run one check. If it fails itself, the others still have their say."""
    try:
        yield from check(machine)
    except Exception as failed:
        yield skipped(f"the check failed itself ({type(failed).__name__}: {failed})")
