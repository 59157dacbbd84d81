"""The process group behind `init_process_group("smddp")`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wrapt

from sdp_plugins.core.open_groups import open_groups
from sdp_plugins.torch.all_to_all import AllToAll
from sdp_plugins.torch.barrier import Barrier
from sdp_plugins.torch.broadcast_gather_scatter import BroadcastGatherScatter
from sdp_plugins.torch.elastic_error_file import ElasticErrorFile
from sdp_plugins.torch.hooked import Hooked
from sdp_plugins.torch.membership import Membership
from sdp_plugins.torch.point_to_point import PointToPoint
from sdp_plugins.torch.reductions import Reductions


class ProcessGroup(
    Membership, Hooked, Reductions, BroadcastGatherScatter, AllToAll, PointToPoint, Barrier
):
    """A c10d process group over a core Group, for CPU tensors."""


def _skip_when_tracing(trace_rules: Any) -> None:
    """Make torch.compile run this package's frames instead of compiling them, but for layers."""
    here = Path(__file__).parent
    paths = {*here.parent.iterdir(), *here.iterdir()} - {here, here / "direct_gradients.py"}
    trace_rules.SKIP_DIRS.extend(map(str, paths))
    trace_rules.add("sdp_plugins.core")  # which makes it read that list


open_groups.observe(ElasticErrorFile())  # registered first, as other observers take longer
# DDP's C++ calls the group's methods in the middle of compiled code, where torch.compile compiles
# every Python frame and fails on those that it cannot trace. The decorator torch.compiler.disable
# would cost microseconds in each call and import the compiler in every program; this hook takes
# effect when another module imports it.
wrapt.register_post_import_hook(_skip_when_tracing, "torch._dynamo.trace_rules")
