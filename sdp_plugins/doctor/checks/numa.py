"""Memory that is near to the cores."""

from __future__ import annotations

from collections.abc import Iterator

from sdp_plugins.core.config import binds_ranks
from sdp_plugins.doctor.finding import Finding, ok, skipped, warning
from sdp_plugins.doctor.machine import Machine
from sdp_plugins.launch.numa import cores_in, nodes_of, shares_of_nodes

_NODES = "sys/devices/system/node"


def numa_binding(machine: Machine) -> Iterator[Finding]:
    """Each rank stays on one NUMA node."""
    found = nodes_of(machine.root / _NODES)
    nodes = [shared for cores in found if (shared := cores & machine.cores)]
    if len(nodes) < 2:
        yield skipped("the cores are of one NUMA node")
    elif machine.launcher or machine.hosts:  # sdp run --hosts binds no ranks
        yield warning(
            f"a rank may use the cores of {len(nodes)} NUMA nodes, so its memory may be far",
            "mpirun --bind-to numa, srun --cpu-bind=ldoms, torchrun --numa-binding=node, or "
            "numactl --cpunodebind=N in each rank",
            slows=True,
        )
    elif not binds_ranks(machine.environment):
        yield warning(
            f"SDP_NUMA=0 lets ranks move between {len(nodes)} NUMA nodes, so memory may be far",
            "unset SDP_NUMA",
            slows=True,
        )
    elif not shares_of_nodes(machine.ranks, nodes, machine.cores):
        yield warning(
            f"{machine.ranks} ranks cannot share {len(nodes)} NUMA nodes evenly, so sdp run does "
            "not bind them",
            f"sdp run -n {len(nodes)}, or a multiple of it",
            slows=True,
        )
    else:
        yield ok(f"sdp run binds {machine.ranks} ranks to {len(nodes)} NUMA nodes")


def numa_memory(machine: Machine) -> Iterator[Finding]:
    """The memory of the cores' nodes may be used."""
    lists = (machine.root / _NODES).glob("node[0-9]*/cpulist")
    nodes = {int(path.parent.name[4:]): cores_in(machine.text(path)) for path in lists}
    ours = {node for node, cores in nodes.items() if cores & machine.cores}
    lines = machine.text("proc/self/status").splitlines()
    texts = [line.split()[-1] for line in lines if line.startswith("Mems_allowed_list:")]
    if len(nodes) < 2 or not texts:
        yield skipped("there is one NUMA node")
    elif ours and not ours & cores_in(texts[0]):
        yield warning(
            f"this process runs on NUMA node {min(ours)} but may only use memory of {texts[0]}",
            f"numactl --cpunodebind={texts[0]} --membind={texts[0]}, or set cpuset.mems alike",
            slows=True,
        )
    else:
        yield ok("this process may use memory of its own NUMA node")
