"""Probes of stream semantics: each fails if an order between streams, or a hold on memory, is lost.

A probe runs on each rank. It closes a gate, makes calls, and opens the gate after `patience_s`: by
then, what is wrongly not ordered behind the gate has happened. No correct implementation needs that
time.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sdp_plugins.core import PeerLostError
from sdp_plugins.torch.accelerator import pieces, pinned_ring
from tests import simdev
from tests.torch.accelerator import device_group
from tests.torch.jobs import assert_same, total, values
from tests.torch.probe import (
    DEADLINE_S,
    PIECE,
    PROBES,
    SLOT_NBYTES,
    assert_fives,
    forgotten,
    gated,
    on_device,
    probe,
    reuses,
    slow_link,
    streams,
    until,
)


def run_probe(rank: int, world: int, name: str, tier: str, patience_s: float) -> None:
    """Run one probe in a group of its own, with small slots."""
    pinned_ring.SLOT_NBYTES = pieces.SLOT_NBYTES = SLOT_NBYTES
    with device_group(tier):
        dist.all_reduce(torch.ones(1, device="simdev"))
        dist.broadcast(torch.ones(1, device="simdev"), 0)
        torch.accelerator.synchronize()
        PROBES[name](rank, world, patience_s)
        dist.barrier()  # a rank that leaves early takes no part in what others have in flight


@probe
def reads_current_stream(rank: int, world: int, patience_s: float) -> None:
    """A reduction reads what earlier work on the current stream writes."""
    for stream in (torch.accelerator.current_stream(), torch.Stream(device="simdev")):
        x, new = torch.zeros(3 * PIECE, device="simdev"), on_device(rank, 3 * PIECE)
        with stream:
            with gated(patience_s):
                x += new
                work = dist.all_reduce(x, async_op=True)
            work.wait()
            assert_same(x.cpu(), total(world, 3 * PIECE))


@probe
def copies_read_current_stream(rank: int, world: int, patience_s: float) -> None:
    """So do the other collectives, of tensors that are contiguous and others."""
    for stream in (torch.accelerator.current_stream(), torch.Stream(device="simdev")):
        x, new = torch.zeros(1000, device="simdev"), on_device(rank, 1000)
        with stream:
            with gated(patience_s):
                x += new
                work = dist.broadcast(x, 0, async_op=True)
            work.wait()
            assert_same(x.cpu(), values(0, 1000))
    for _ in range(4):  # the copy that makes it contiguous races with its reader
        x = on_device(rank, 2**20).view(2**10, 2**10).t()
        with gated(patience_s / 4):
            work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        assert_same(x.cpu(), values(0, 2**20).view(2**10, 2**10).t())


@probe
def wait_orders_streams(rank: int, world: int, patience_s: float) -> None:
    """After wait(), the current stream sees the result, and no other stream waits."""
    for shape in ((3 * PIECE,), (PIECE // 64, 64)):  # the second is not contiguous
        count, other = 3 * PIECE if len(shape) == 1 else PIECE, torch.Stream(device="simdev")
        x = on_device(rank, count)
        layout = x if len(shape) == 1 else x.view(shape).t()
        with gated(patience_s, streams().up):
            work = dist.all_reduce(layout, async_op=True)
            work.wait()
            seen = x * 1
            with other:
                work.wait()
                seen_there = x * 1
        torch.accelerator.synchronize()
        assert_same([seen.cpu(), seen_there.cpu()], [total(world, count)] * 2)


@probe
def copies_wait_orders_streams(rank: int, world: int, patience_s: float) -> None:
    """After wait(), the current stream sees the result of a broadcast and of a message."""
    x, other = on_device(rank, 1000), torch.Stream(device="simdev")
    received = torch.zeros(1000, device="simdev")
    torch.accelerator.synchronize()
    with gated(patience_s, streams().up):
        work = dist.broadcast(x, 0, async_op=True)
        receiving = dist.irecv(received, (rank - 1) % world)
        dist.isend(on_device_of_other_streams(rank, 1000, other), (rank + 1) % world).wait()
        for each in (work, receiving):
            each.wait()
        seen, got = x * 1, received * 1
        with other:
            for each in (work, receiving):
                each.wait()
            seen_there, got_there = x * 1, received * 1
    torch.accelerator.synchronize()
    assert_same([seen.cpu(), seen_there.cpu()], [values(0, 1000)] * 2)
    assert_same([got.cpu(), got_there.cpu()], [values((rank - 1) % world, 1000)] * 2)


def on_device_of_other_streams(rank: int, count: int, stream: torch.Stream) -> Tensor:
    """A rank's values, made on a stream, without waiting for all streams."""
    with stream:
        made = values(rank, count).to("simdev")
    stream.synchronize()
    return made


@probe
def calls_on_one_tensor_run_in_order(rank: int, world: int, patience_s: float) -> None:
    """Without a wait in between, as on CPU tensors; views of one tensor, too."""
    reduce, share = dist.all_reduce, partial(dist.broadcast, src=1)
    one, summed = values(1, PIECE), total(world, PIECE)
    for first, second, expected in (
        (reduce, reduce, world * summed),
        (share, reduce, world * one),
        (reduce, share, summed),
        (share, share, one),
    ):
        x = on_device(rank, 2 * PIECE)
        torch.accelerator.synchronize()
        with gated(patience_s, streams().up):
            works = [first(x, async_op=True), second(x[:PIECE], async_op=True)]
        for work in works:
            work.wait()
        assert_same(x[:PIECE].cpu(), expected)


@probe
def calls_do_not_wait_for_the_device(rank: int, world: int, patience_s: float) -> None:
    """An asynchronous call returns although the device has not reached it."""
    source, to = (rank - 1) % world, (rank + 1) % world
    a, b, c, received = (on_device(rank + 10 * i, 1000) for i in range(4))
    before = received.cpu()
    with gated(patience_s):
        seen = received * 1  # an earlier reader, which the message must not overtake
        works = [dist.all_reduce(a, async_op=True), dist.broadcast(b, 0, async_op=True)]
        works += [dist.irecv(received, source), dist.isend(c, to)]
    for work in works:
        work.wait()
    expected = [total(world, 1000), values(10, 1000), values(source + 20, 1000), before]
    assert_same([x.cpu() for x in (a, b, received, seen)], expected)


@probe
def messages_do_not_overtake_readers(rank: int, world: int, patience_s: float) -> None:
    """A message that is there at once is copied behind earlier work on the current stream."""
    received, other = on_device(rank, 1000), torch.Stream(device="simdev")
    before = received.cpu()
    with gated(patience_s):
        seen = received * 1
        receiving = dist.irecv(received, (rank - 1) % world)
        with other:
            sent = values(rank + 10, 1000).to("simdev")
            dist.isend(sent, (rank + 1) % world)
            forgotten(receiving)
    receiving.wait()
    assert_same([received.cpu(), seen.cpu()], [values((rank - 1) % world + 10, 1000), before])


@probe
def works_over_a_slow_link(rank: int, world: int, patience_s: float) -> None:
    """No step of a reduction runs before the copy that it needs is over."""
    dist.all_reduce(on_device(rank, 2 * pinned_ring.SLOTS * PIECE))  # flags have been in use
    for stream in (torch.accelerator.current_stream(), torch.Stream(device="simdev")):
        x = on_device(rank, PIECE)
        with slow_link(x.nbytes, patience_s), stream:
            dist.all_reduce(x)
            seen = x * 1
            assert_same(seen.cpu(), total(world, PIECE))


@probe
def copies_over_a_slow_link(rank: int, world: int, patience_s: float) -> None:
    """No step of another call runs before the copy that it needs is over."""
    source = (rank - 1) % world
    for stream in (torch.accelerator.current_stream(), torch.Stream(device="simdev")):
        # Different numbers: pinned memory that is used again may hold those of an earlier call.
        x, y, z = (on_device(rank + 10 * i, PIECE) for i in range(3))
        with slow_link(x.nbytes, patience_s), stream:
            receiving = dist.irecv(z, source)
            dist.isend(x, (rank + 1) % world).wait()
            receiving.wait()
            got = z * 1
            dist.broadcast(y, 0)
            seen = y * 1
            assert_same(got.cpu(), values(source, PIECE))
            assert_same(seen.cpu(), values(10, PIECE))


@probe
def results_wait_for_peers(rank: int, world: int, patience_s: float) -> None:
    """What comes up is what late peers have taken part in."""
    x, y = (on_device(rank + 10 * i, PIECE) for i in range(2))
    with gated(patience_s, *(streams()[:1] if rank == 0 else [torch.Stream(device="simdev")])):
        works = [dist.broadcast(x, 0, async_op=True), dist.all_reduce(y, async_op=True)]
    for work in works:
        work.wait()
    assert_same([x.cpu(), y.cpu()], [values(0, PIECE), total(world, PIECE) + 10 * world])


@probe
def slots_are_reused_safely(rank: int, world: int, patience_s: float) -> None:
    """More pieces than slots, in one call and in many, while none can be copied up."""
    count = 2 * pinned_ring.SLOTS + 3
    large, small = on_device(rank, count * PIECE), [on_device(rank + i, 99) for i in range(count)]
    with gated(patience_s, streams().up):
        works = [dist.all_reduce(x, async_op=True) for x in (large, *small)]
    for work in works:
        work.wait()
    assert_same(large.cpu(), total(world, count * PIECE))
    for i, x in enumerate(small):
        assert_same(x.cpu(), total(world, 99) + i * world)


@probe
def dropped_tensors_are_kept(rank: int, world: int, patience_s: float) -> None:
    """The memory of a tensor that is dropped after the call is not reused before the copies."""
    x = on_device(rank, PIECE)
    address = x.data_ptr()
    with gated(0, streams().up):
        work = dist.all_reduce(x, async_op=True)
        forgotten(work)
        del work, x
        made = reuses((PIECE,), patience_s, address)
    assert_fives(made)


@probe
def temporaries_are_kept(rank: int, world: int, patience_s: float) -> None:
    """The memory of a contiguous copy is not reused before it is copied back."""
    x = on_device(rank, 2**14).view(2**7, 2**7).t()
    with gated(0, streams().up):
        work = dist.all_reduce(x, async_op=True)
        forgotten(work)
        made = reuses((2**7, 2**7), patience_s)
    assert_fives(made)
    assert_same(x.cpu(), total(world, 2**14).view(2**7, 2**7).t())


@probe
def copies_keep_dropped_tensors(rank: int, world: int, patience_s: float) -> None:
    """The other collectives keep memory until their copies are over."""
    x = on_device(rank, 1000)
    address = x.data_ptr()
    with gated(0, streams().up):
        work = dist.broadcast(x, 0, async_op=True)
        forgotten(work)
        del work, x
        made = reuses((1000,), patience_s, address)
    assert_fives(made)
    del made
    y = on_device(rank, 2**14).view(2**7, 2**7).t()
    with gated(0, streams().down):
        work = dist.broadcast(y, 0, async_op=True)
        made = reuses((2**7, 2**7), patience_s)
        torch.accelerator.current_stream().synchronize()
    work.wait()
    assert_same(y.cpu(), values(0, 2**14).view(2**7, 2**7).t())
    assert_fives(made)


@probe
def futures_order_streams(rank: int, world: int, patience_s: float) -> None:
    """Futures, those of callbacks, and torch's own over several, order who waits."""
    tensors = [on_device(rank, PIECE) for _ in range(4)]
    other = torch.Stream(device="simdev")
    with gated(patience_s, streams().up):
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        futures = [work.get_future() for work in works]
        doubled = futures[1].then(lambda future: future.value()[0] * 2)
        both = torch.futures.collect_all(futures[2:])
        with other:
            seen = [futures[0].wait()[0] * 1, doubled.wait() * 1]
            seen += [future.wait()[0] * 1 for future in both.wait()]
    torch.accelerator.synchronize()
    expected = total(world, PIECE)
    assert_same([x.cpu() for x in seen], [expected, 2 * expected, expected, expected])


@probe
def callbacks_have_a_stream_of_their_own(rank: int, world: int, patience_s: float) -> None:
    """A callback that waits for the result holds up no stream of the program's."""
    x, seen = on_device(rank, PIECE), []
    with gated(0, streams().up):
        future = dist.all_reduce(x, async_op=True).get_future()
        doubled = future.then(lambda _: seen.append(torch.accelerator.current_stream()))
        doubled.wait()
    assert seen[0] not in (torch.simdev.default_stream(), *streams()[:2])


@probe
def callbacks_keep_what_they_read(rank: int, world: int, patience_s: float) -> None:
    """The memory of a result is not reused before callbacks have read it."""
    x = on_device(rank, PIECE)
    address = x.data_ptr()
    called = threading.Event()

    def double(future: Any) -> Tensor:
        result: Tensor = future.value()[0] * 2
        called.set()
        return result

    with gated(0, streams().side):
        doubled = dist.all_reduce(x, async_op=True).get_future().then(double)
        assert called.wait(DEADLINE_S)
        streams().up.synchronize()
        del x
        dist.all_reduce(torch.ones(1, device="simdev"))  # the group looks at finished works
        made = reuses((PIECE,), patience_s, address)
        torch.accelerator.current_stream().synchronize()
    assert_same(doubled.wait().cpu(), 2 * total(world, PIECE))
    assert_fives(made)


@probe
def works_end_with_their_copies(rank: int, world: int, patience_s: float) -> None:
    """is_completed() is true once the result is in device memory, and so is is_success()."""
    tensors = [on_device(rank, 100) for _ in range(2)]
    with gated(0, streams().up):
        works = [dist.all_reduce(tensors[0], async_op=True)]
        works.append(dist.broadcast(tensors[1], 0, async_op=True))
        for work in works:
            work.wait()
            assert not until(work.is_completed, patience_s)
            assert work.exception() is None
            assert not work.is_success()
    for work, x in zip(works, tensors, strict=True):
        assert until(work.is_completed)
        assert work.is_success()
        assert work.result()[0].data_ptr() == x.data_ptr()


@probe
def a_group_of_one_orders_streams(rank: int, world: int, patience_s: float) -> None:
    """Where there is nothing to reduce, the result is what earlier work writes."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    x, new = torch.zeros(100, device="simdev"), on_device(rank, 100)
    other = torch.Stream(device="simdev")
    with gated(patience_s):
        x += new
        work = dist.all_reduce(x, group=alone, async_op=True)
        with other:
            work.wait()
            seen = x * 1
            future = work.get_future().then(lambda done: done.value()[0] * 1).wait()
        assert not work.is_completed()
    torch.accelerator.synchronize()
    assert_same([seen.cpu(), future.cpu()], [values(rank, 100)] * 2)


@probe
def closing_waits_for_copies_up(rank: int, world: int, patience_s: float) -> None:
    """Memory is unpinned after the last copy; the group is closed after the probe."""
    gate, x = simdev.gate(), on_device(rank, 3 * PIECE)
    gate.block(streams().up)
    forgotten(dist.all_reduce(x, async_op=True))
    threading.Timer(0.1 + patience_s, gate.open).start()


@probe
def closing_waits_for_copies_down(rank: int, world: int, patience_s: float) -> None:
    """So it is where copies down still run; closing waits 0.5 s for calls in flight."""
    group = dist.new_group()
    x = on_device(rank, 3 * PIECE)
    dist.all_reduce(x, group=group)
    gate = simdev.gate()
    gate.block(streams(group=group).down)
    dist.all_reduce(x, group=group, async_op=True)
    threading.Timer(0.6 + patience_s, gate.open).start()
    with suppress(PeerLostError):  # if the other rank has closed it
        dist.destroy_process_group(group)
