"""The process group behind `init_process_group("smddp")`."""

from __future__ import annotations

from sdp_plugins.core.open_groups import open_groups
from sdp_plugins.torch.all_to_all import AllToAll
from sdp_plugins.torch.barrier import Barrier
from sdp_plugins.torch.broadcast_gather_scatter import BroadcastGatherScatter
from sdp_plugins.torch.elastic_error_file import ElasticErrorFile
from sdp_plugins.torch.point_to_point import PointToPoint
from sdp_plugins.torch.reductions import Reductions
from sdp_plugins.torch.torch_compile import skip_when_tracing


class ProcessGroup(Reductions, BroadcastGatherScatter, AllToAll, PointToPoint, Barrier):
    """A c10d process group over a core Group, for CPU tensors."""


open_groups.observe(ElasticErrorFile())  # registered first, as other observers take longer
skip_when_tracing()
