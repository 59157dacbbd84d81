"""Nodes as network namespaces, each with one shaped link to a switch."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "net0"
MOST_NODES = 250
SUBNET = "10.77.0.0/24"
CONGESTION_CONTROL = ("cubic", "reno")
"""TCP's congestion control between nodes: the first that the kernel has; reno always exists."""
BURST = "256kb"
QUEUE = "25ms"
"""The longest time of a packet in the queue, about the size of a switch's buffers."""


@dataclass(frozen=True)
class Traffic:
    """The traffic of a node's link in bytes, including frame headers."""

    sent: int
    received: int

    def since(self, before: Traffic) -> Traffic:
        """Return the difference."""
        return Traffic(self.sent - before.sent, self.received - before.received)


class Network:
    """The nodes while they run, within a sandbox.

    The nodes use Linux's default TCP congestion control, whatever this machine's is: others (BBR)
    detect a free link only slowly.

    Args:
        nodes: Number of nodes.
        gbit: Speed of every link in each direction, in 1e9 bits/s.
    """

    def __init__(self, nodes: int, gbit: float) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise ValueError(f"there can be 1 to {MOST_NODES} nodes, not {nodes}")
        self.nodes = nodes
        self.gbit = gbit
        self._folder = tempfile.TemporaryDirectory(prefix="sdp-cluster-")

    def __enter__(self) -> Network:
        _run("ip link set lo up")
        _run("ip link add sdp-switch type bridge")
        _run("ip link set sdp-switch up")
        for node in range(self.nodes):
            self._add(node)
        hosts = "".join(f"{self.address(n)} {self.host(n)}\n" for n in range(self.nodes))
        path = Path(self._folder.name) / "hosts"
        path.write_text(f"127.0.0.1 localhost\n{hosts}")
        _run(f"mount --bind {path} /etc/hosts")
        return self

    def __exit__(self, *exc_info: object) -> None:
        _run("umount /etc/hosts")
        for node in range(self.nodes):
            _run(f"ip link delete sdp-port{node}")
            _run(f"ip netns delete {self.host(node)}")
            _run(f"umount {self._uts(node)}")
        _run("ip link delete sdp-switch")
        self._folder.cleanup()

    def host(self, node: int) -> str:
        """Return a node's name."""
        return f"node{node}"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, line: Sequence[str]) -> list[str]:
        """Return a command line that runs `line` on a node."""
        return [
            "ip",
            "netns",
            "exec",
            self.host(node),
            "nsenter",
            f"--uts={self._uts(node)}",
            *line,
        ]

    def traffic(self, node: int) -> Traffic:
        """Return the traffic of a node's link so far."""
        text = _run(f"ip -json -stats link show sdp-port{node}")
        stats = json.loads(text)[0]["stats64"]
        # These are counters of the switch's end: it sends what the node receives.
        return Traffic(stats["rx"]["bytes"], stats["tx"]["bytes"])

    def count(self, run: Callable[[], object]) -> list[int]:
        """Return the bytes on each node's link while `run` runs, in its busier direction."""
        before = [self.traffic(node) for node in range(self.nodes)]
        run()
        after = [self.traffic(node) for node in range(self.nodes)]
        spent = [now.since(then) for now, then in zip(after, before, strict=True)]
        return [max(traffic.sent, traffic.received) for traffic in spent]

    def set_speed(self, gbit: float) -> None:
        """Set the speed of all links; programs on the nodes continue."""
        self.gbit = gbit
        for node in range(self.nodes):
            self._shape(node)

    def _shape(self, node: int) -> None:
        shape = f"root tbf rate {round(self.gbit * 1e6)}kbit burst {BURST} latency {QUEUE}"
        _run(f"tc qdisc replace dev sdp-port{node} {shape}")
        _run(f"tc -n {self.host(node)} qdisc replace dev {INTERFACE} {shape}")

    def _route(self, node: int) -> None:
        # Set on the route: a namespace may only select an algorithm that the machine allows to
        # everyone.
        to_others = f"{SUBNET} dev {INTERFACE} src {self.address(node)}"
        replace = f"ip -n {self.host(node)} route replace {to_others} congctl"
        preferred, always_there = CONGESTION_CONTROL
        try:
            _run(f"{replace} {preferred}")
        except OSError:
            _run(f"{replace} {always_there}")

    def _uts(self, node: int) -> str:
        return f"{self._folder.name}/uts{node}"

    def _add(self, node: int) -> None:
        host, port = self.host(node), f"sdp-port{node}"
        _run(f"ip netns add {host}")
        _run(f"ip link add {port} type veth peer name {INTERFACE} netns {host}")
        _run(f"ip link set {port} master sdp-switch up")
        _run(f"ip -n {host} address add {self.address(node)}/24 dev {INTERFACE}")
        _run(f"ip -n {host} link set {INTERFACE} up")
        _run(f"ip -n {host} link set lo up")
        self._route(node)
        self._shape(node)
        Path(self._uts(node)).touch()
        _run(f"unshare --uts={self._uts(node)} hostname {host}")


def _run(line: str) -> str:
    done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{line}: {done.stderr.strip()}")
    return done.stdout
