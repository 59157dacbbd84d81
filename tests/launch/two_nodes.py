"""Runs a command on the first of two nodes, or SDP_TEST_NODES: namespaces of this process' own.

Programs that start others on a node find a stand-in for ssh as the MPIs' settings name it. Like ssh
it hands no variables on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.testbed import sandbox, start
from benchmarks.testbed.network import Network

SHELLS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")
LOGIN = "PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/dev/shm"

TWO_NODES = sandbox.command([sys.executable, "-m", "tests.launch.two_nodes"])
# Runs on the first node: starts a job, reads so many lines, does something to it, and prints what
# is left of it.
LEFT = """
    import psutil
    def names():
        found = (p for p in psutil.process_iter(["name", "cmdline", "status"]))
        return sorted(" ".join(p.info["cmdline"] or [p.info["name"]]) for p in found
                      if p.info["status"] != "zombie" and p.pid not in before)
    before = {p.pid for p in psutil.process_iter()}
    job = subprocess.Popen(sys.argv[3:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = sorted(job.stdout.readline() for _ in range(int(sys.argv[2])))
    there = len(names())
    if sys.argv[1] != "nothing": job.send_signal(int(sys.argv[1]))
    end = time.monotonic() + 200
    _, errors = job.communicate()
    while (left := names()) and time.monotonic() < end: time.sleep(0.02)
    print(json.dumps([job.returncode, lines, there, left, errors]))
"""


def main() -> int:
    """Run it; its exit code."""
    sandbox.prepare()
    nodes = int(os.environ.get("SDP_TEST_NODES", "2"))
    with Network(nodes, 1.0) as network, tempfile.TemporaryDirectory() as folder:
        shell = Path(folder, "ssh")
        there = start.remote_shell(network, folder)
        shell.write_text(
            '#!/bin/sh\nwhile [ "${1#-o}" != "$1" ]; do shift; done\n'
            f'exec env -i {LOGIN} {there} "$@"\n'
        )
        shell.chmod(0o755)
        ours = {**os.environ, **start.environment(network), **dict.fromkeys(SHELLS, str(shell))}
        return subprocess.run(network.command(0, sys.argv[1:]), env=ours, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
