"""Makes process groups: as torch's options say, of a group's part, or of ranks that have met."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import PrefixStore, Store

from sdp_plugins.core import Group
from sdp_plugins.core.config import Config
from sdp_plugins.core.rank_names import DEFAULT, RankNames
from sdp_plugins.core.regroup import Meeting
from sdp_plugins.torch.group_options import Options
from sdp_plugins.torch.internals import c10d
from sdp_plugins.torch.meeting_store import store_of
from sdp_plugins.torch.options import group_seconds
from sdp_plugins.torch.process_group import ProcessGroup
from sdp_plugins.torch.rendezvous import TorchRendezvous
from sdp_plugins.torch.store_shutdown import StoreShutdown

UNREADY = "it waits for reconfigure(), as enable_reconfigure=True asks. Hint: call reconfigure()"


def make_group(options: Any, meeting: Meeting | None, chosen: Options) -> ProcessGroup:
    """Create a process group.

    Args:
        options: c10d's DistributedBackendOptions.
        meeting: The ranks, if they have met already.
        chosen: What the program has chosen.
    """
    made = ProcessGroup(*_arguments(options, meeting, chosen))
    made.make_part, made.make_again = _part_maker(options, chosen), partial(_make_again, chosen)
    return made


def make_unready_group(options: Any, chosen: Options) -> ProcessGroup:
    """Create a process group whose calls raise an error until it is reconfigured."""
    config = Config.from_env()
    names, timeout_s = RankNames(DEFAULT, 1), group_seconds(options.timeout, config)
    alone = Group.from_exchange(lambda blob, _: [blob], 0, names, timeout_s, None, config)
    alone.abort(UNREADY)
    made = ProcessGroup(alone, partial(_raise_unready, alone), False)
    made.make_again = partial(_make_again, chosen)
    return made


def _raise_unready(group: Group, name: str, for_devices: bool = False) -> Group:
    group.barrier()  # raises
    return group


def _arguments(options: Any, meeting: Meeting | None, chosen: Options) -> tuple[Any, ...]:
    """Return the arguments of a ProcessGroup."""
    config = Config.from_env().on_the_wire(chosen.wire_dtype)  # raises before any rank waits
    rendezvous = TorchRendezvous(options, config, meeting)
    group = rendezvous.make_group()
    serves_no_store = options.global_ranks_in_group or options.group_rank == 0 or meeting
    shutdown = None if serves_no_store else StoreShutdown.of(options.store)
    return group, partial(rendezvous.make_extra_group, group), config.register, shutdown


def _make_again(
    chosen: Options, meeting: Meeting, host: str, timeout: timedelta
) -> tuple[Any, Any, Any]:
    """Return the arguments of a ProcessGroup of ranks that have met, its store, what splits it."""
    options = c10d._DistributedBackendOptions()
    store = PrefixStore("default_pg", store_of(meeting, host, timeout.total_seconds()))
    options.store, options.timeout = PrefixStore("cpu/", store), timeout
    options.group_rank, options.group_size = meeting.rank, meeting.world_size
    options.group_id, options.global_ranks_in_group = "0", []
    return _arguments(options, meeting, chosen), store, _part_maker(options, chosen)


def _part_maker(options: Any, chosen: Options) -> Any:
    members = options.global_ranks_in_group or list(range(options.group_size))
    return partial(_make_part, chosen, options.store, members, options.group_rank)


def _make_part(
    chosen: Options,
    parents_store: Store,
    members: list[int],
    rank: int,
    ranks: list[int],
    name: str,
    timeout: timedelta,
    store: Store | None = None,
) -> ProcessGroup | None:
    """Create the group of some of a group's ranks; None on the others."""
    if rank not in ranks:
        return None
    options = c10d._DistributedBackendOptions()
    options.store = store or PrefixStore(f"{name}/", parents_store)
    options.group_rank, options.group_size = ranks.index(rank), len(ranks)
    options.timeout, options.group_id = timeout, name
    options.global_ranks_in_group = [members[each] for each in ranks]
    return make_group(options, None, chosen)
