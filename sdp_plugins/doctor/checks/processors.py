"""Ranks and threads against the cores that they may use."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sdp_plugins.core.control_groups import folders
from sdp_plugins.doctor.finding import Finding, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.numa import cores_in

# The instruction sets of csrc/kernel_choice.cpp.
_AVX2 = {"avx2", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# With these drivers, "powersave" follows the load.
_DYNAMIC_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")

_IDLE = 0.2  # what a machine has at least on which ranks need not wait
_LOOK_S = 0.3


def threads(machine: Machine) -> Iterator[Finding]:
    """The threads of all ranks have a core each."""
    ranks, cores = machine.ranks, machine.usable_cores
    share = max(1, cores // ranks)
    given = machine.environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    each = int(given) if given.isdecimal() else 0
    if each * ranks > max(cores, ranks):
        yield warning(
            f"OMP_NUM_THREADS={each} gives {ranks} ranks {each * ranks} threads on {cores} cores",
            f"export OMP_NUM_THREADS={share}",
            slows=True,
        )
    elif each:
        yield ok(f"OMP_NUM_THREADS={each}: {ranks} ranks have {each * ranks} threads")
    elif ranks > 1 and (machine.hosts or machine.launcher not in ("", "torchrun")):
        yield warning(
            f"each of {ranks} ranks starts a thread for each core, as OMP_NUM_THREADS is not set",
            f"sdp run --threads {share}; with mpirun: -x OMP_NUM_THREADS={share}, or -genv",
            slows=True,
        )
    else:
        yield ok(f"sdp run gives each of {ranks} ranks {share} of {cores} cores as threads")


def engine_threads(machine: Machine) -> Iterator[Finding]:
    """The threads that share reductions have a core each."""
    given = machine.environment.get("SDP_ENGINE_THREADS", "").strip()
    ranks, cores = machine.ranks, machine.usable_cores
    total = int(given) * ranks if given.isdecimal() else 0
    if total > max(cores, ranks):
        yield warning(
            f"SDP_ENGINE_THREADS={given} has {total} threads wait for each other on {cores} cores",
            "unset SDP_ENGINE_THREADS",
            slows=True,
        )
    else:
        yield ok(f"SDP_ENGINE_THREADS is {given or 'not set'}")


def ranks_per_core(machine: Machine) -> Iterator[Finding]:
    """Each rank has a core."""
    ranks, cores = machine.ranks, machine.usable_cores
    if ranks > cores:
        yield warning(
            f"{ranks} ranks share {cores} cores, so each wait ends with a change of processes",
            f"sdp run -n {cores}",
            slows=True,
        )
    else:
        yield ok(f"{ranks} ranks have {cores} cores")


def cpu_quota(machine: Machine) -> Iterator[Finding]:
    """No control group limits the time of the cores that this process sees."""
    seen = len(machine.cores)
    if machine.quota < seen:
        share = max(1, machine.usable_cores // machine.ranks)
        yield warning(
            f"a control group allows the time of {machine.quota:g} of the {seen} cores that "
            "programs see, and stops them when it is used up",
            "start the ranks by sdp run, which starts threads for that time only, or "
            f"export OMP_NUM_THREADS={share}, or limit the container by --cpuset-cpus",
            slows=bool(machine.launcher),
        )
    else:
        yield ok("no control group limits the processors' time")


def core_binding(machine: Machine) -> Iterator[Finding]:
    """This process, and so the ranks that it starts, are not bound to one core."""
    online, allowed = _online_cores(machine), _cpuset(machine)
    if len(machine.cores) == 1 and online > 1:
        yield warning(
            f"this process is bound to one of {online} cores, and so are the ranks that it starts",
            "give the container, or the job, more cores"
            if len(cores_in(allowed)) == 1
            else f"taskset -cp {allowed or f'0-{online - 1}'} $$, or mpirun --bind-to none",
            slows=True,
        )
    else:
        yield ok(f"this process may use {len(machine.cores)} of {online} cores")


def _cpuset(machine: Machine) -> str:
    """The cores that the innermost control group allows; empty if it does not say."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus")  # of version 2, and 1
    texts = (machine.text(g / n) for g in folders("cpuset", machine.root) for n in names)
    return next(filter(None, texts), "")


def _online_cores(machine: Machine) -> int:
    listed = cores_in(machine.text("sys/devices/system/cpu/online"))
    return len(listed) or len(machine.cores)


def frequency(machine: Machine) -> Iterator[Finding]:
    """The cores do not stay at their lowest frequency."""
    folder = machine.root / "sys/devices/system/cpu"
    governors = sorted(folder.glob("cpu[0-9]*/cpufreq/scaling_governor"))
    if not governors:
        yield skipped("the kernel does not show the processors' frequency, as in most VMs")
        return
    drivers = {machine.text(path.with_name("scaling_driver")) for path in governors}
    slow = [path for path in governors if machine.text(path) == "powersave"]
    if slow and not drivers <= {*_DYNAMIC_DRIVERS}:
        yield warning(
            f"{len(slow)} of {len(governors)} cores stay at their lowest frequency (powersave)",
            "sudo cpupower frequency-set -g performance",
            slows=True,
        )
    else:
        yield ok("the frequency follows the load")


def load(machine: Machine) -> Iterator[Finding]:
    """Nothing else uses the cores."""
    words = machine.text("proc/loadavg").split()
    cores = _online_cores(machine)  # it is the load of all of them
    if not words:
        yield skipped("the kernel does not show the load")
    elif float(words[0]) > cores and _idle_share(machine) > _IDLE:
        yield ok(f"the load was {words[0]} on {cores} cores in the last minute, and they idle now")
    elif float(words[0]) > cores:
        yield warning(
            f"the load of this machine is {words[0]} on {cores} cores, so ranks wait for a core",
            "end what else runs (see `top`), and run sdp doctor again",
            slows=True,
        )
    else:
        yield ok(f"the load is {words[0]} on {cores} cores")


def _idle_share(machine: Machine) -> float:
    """The part of the cores' time in which they idle now; 0 if the kernel does not show it."""
    before = _times(machine)
    time.sleep(_LOOK_S)
    spent = [b - a for a, b in zip(before, _times(machine), strict=True)]
    return sum(spent[3:5]) / sum(spent) if sum(spent) else 0.0  # idle, and waiting for disks


def _times(machine: Machine) -> list[int]:
    """The cores' times by kind."""
    return [int(word) for word in machine.text("proc/stat").partition("\n")[0].split()[1:9]]


def instruction_set(machine: Machine) -> Iterator[Finding]:
    """The reductions use wide registers."""
    lines = machine.text("proc/cpuinfo").splitlines()
    flags = {*next((line for line in lines if line.startswith("flags")), "").split()}
    if not flags:
        yield skipped("this is no x86 processor: the compiler has chosen the instructions")
    elif flags >= _AVX512:
        yield ok("reductions use AVX-512")
    elif flags >= _AVX2:
        yield ok("reductions use AVX2")
    else:
        yield warning(
            "this processor shows no AVX2, so reductions use SSE2, and 16-bit types are slow",
            "have the VM show the host's processor (QEMU: -cpu host)",
            slows=True,
        )
