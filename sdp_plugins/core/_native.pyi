"""
The native core: shared-memory collectives and balanced fusion buffers.
"""

from collections.abc import Sequence
import enum

from typing_extensions import CapsuleType


class DType(enum.IntEnum):
    float16 = 0

    float32 = 1

    float64 = 2

    bfloat16 = 3

    int8 = 4

    int16 = 5

    int32 = 6

    int64 = 7

    uint8 = 8

    bool = 9

    complex64 = 10

    complex128 = 11

class ReduceOp(enum.IntEnum):
    sum = 0

    avg = 1

    product = 2

    min = 3

    max = 4

    band = 5

    bor = 6

    bxor = 7

    premul_sum = 8

class Op(enum.IntEnum):
    all_reduce = 0

    reduce = 1

    broadcast = 2

    all_gather = 3

    reduce_scatter = 4

    gather = 5

    scatter = 6

    all_to_all = 7

    barrier = 8

    send = 9

    recv = 10

class OpSignature:
    """What identifies an operation in messages."""

    @staticmethod
    def of(fields: tuple[int, int, int, int, int, int, int, int, int]) -> OpSignature:
        """Of what `fields` has returned, here or on another node."""

    @property
    def fields(self) -> tuple[int, int, int, int, int, int, int, int, int]: ...

    @property
    def number(self) -> str:
        """Such as `all_reduce #7`."""

    def title(self, global_ranks: Sequence[int] = []) -> str:
        """Such as `all_reduce #7 float32[25] sum`."""

    def with_global_ranks(self, global_ranks: Sequence[int]) -> OpSignature:
        """The same, with root and peer as the job numbers them."""

class Failure:
    """A failure as fields, and its text once it is composed."""

    def __init__(self, kind: str, cause: str, ranks: Sequence[int], across_nodes: bool = False) -> None:
        """`across_nodes`: whether its hint is that of failures between nodes."""

    @property
    def kind(self) -> str: ...

    @property
    def cause(self) -> str: ...

    @property
    def summary(self) -> str: ...

    @property
    def text(self) -> str: ...

    @property
    def ranks(self) -> list[int]: ...

    @property
    def origin_rank(self) -> int:
        """-1: this rank."""

    @origin_rank.setter
    def origin_rank(self, arg: int, /) -> None: ...

    @property
    def origin_name(self) -> str: ...

    @origin_name.setter
    def origin_name(self, arg: str, /) -> None: ...

    @property
    def global_ranks(self) -> list[int]: ...

    @property
    def global_origin_rank(self) -> int: ...

    @property
    def is_repeat(self) -> bool: ...

    @is_repeat.setter
    def is_repeat(self, arg: bool, /) -> None: ...

    @property
    def op(self) -> str: ...

    @op.setter
    def op(self, arg: str, /) -> None: ...

    @property
    def seq(self) -> int: ...

    @seq.setter
    def seq(self, arg: int, /) -> None: ...

    @property
    def elapsed_s(self) -> float: ...

    @elapsed_s.setter
    def elapsed_s(self, arg: float, /) -> None: ...

    @property
    def operation(self) -> OpSignature | None: ...

    @operation.setter
    def operation(self, arg: OpSignature | None, /) -> None: ...

    @property
    def origin_operation(self) -> OpSignature | None: ...

    @origin_operation.setter
    def origin_operation(self, arg: OpSignature | None, /) -> None: ...

    @property
    def group(self) -> int:
        """Token of the group that has failed by it; 0: none has."""

    @group.setter
    def group(self, arg: int, /) -> None: ...

    def happened_in(self, operation: OpSignature, last_completed: OpSignature | None, elapsed_s: float) -> None: ...

    def compose(self, error_prefix: str, rank: int, global_ranks: Sequence[int] = []) -> None:
        """Makes the text of the fields, as rank `rank` words it."""

    def set_text(self, summary: str, text: str, global_ranks: Sequence[int], global_origin_rank: int) -> None:
        """Takes over a text that was composed elsewhere."""

class Work:
    """A handle on an operation that an engine will finish."""

    def __init__(self) -> None: ...

    def finish(self, source_rank: int = -1) -> None:
        """Done; called once, by whoever ran the operation."""

    def fail(self, failure: Failure) -> None:
        """Done, with a failure."""

    def wait(self, timeout_s: float) -> bool:
        """
        True when done, False after the time-out; raises the operation's failure.
        """

    def completed(self) -> bool: ...

    def failure(self) -> BaseException | None:
        """The operation's failure, if it has completed with one."""

    def source_rank(self) -> int: ...

    def waiter(self) -> tuple[int, int]:
        """
        (since, thread) of the first to wait for it before it was done, by the monotonic clock in nanoseconds; 0 if nobody did.
        """

class CompletionSignal:
    """Tells one thread that works are done."""

    def __init__(self) -> None: ...

    def set(self) -> None: ...

    def set_after(self, work: Work) -> None:
        """
        Sets it once the work is done, which may be now; takes no GIL for that.
        """

    def wait(self) -> None:
        """Waits until it is set, and clears it."""

class Part:
    """What makes a request one step of a larger group's operation."""

    def __init__(self, operation: OpSignature, last_completed: OpSignature | None, patience_s: float, accumulates: bool = False, compares_only: bool = False) -> None:
        """
        `operation`: of which messages speak. `patience_s`: added to the time-out while all that are late wait for other nodes. `accumulates`: a reduction stays in accumulators. `compares_only`: ends when all ranks here have announced the operation.
        """

class Request:
    """An operation as its caller describes it."""

    def __init__(self, op: Op, dtype: DType, sends: Sequence[tuple[int, int]], recvs: Sequence[tuple[int, int]], timeout_s: float, reduce_op: ReduceOp = ReduceOp.sum, root: int = -1) -> None:
        """
        Pieces of memory are given by address and number of elements; their owners have to keep them until the operation is done.
        """

    def __copy__(self) -> Request: ...

    @property
    def op(self) -> Op: ...

    @property
    def dtype(self) -> DType: ...

    @property
    def reduce_op(self) -> ReduceOp: ...

    @property
    def root(self) -> int: ...

    @property
    def sends(self) -> list[tuple[int, int]]: ...

    @sends.setter
    def sends(self, arg: Sequence[tuple[int, int]], /) -> None: ...

    @property
    def recvs(self) -> list[tuple[int, int]]: ...

    @property
    def timeout_s(self) -> float: ...

    @timeout_s.setter
    def timeout_s(self, arg: float, /) -> None: ...

    @property
    def factor(self) -> float:
        """Of PREMUL_SUM."""

    @factor.setter
    def factor(self, arg: float, /) -> None: ...

    @property
    def layout(self) -> int:
        """Of a fusion buffer."""

    @property
    def peer(self) -> int:
        """Of a send or a receive; -1: from any rank."""

    @peer.setter
    def peer(self, arg: int, /) -> None: ...

    @property
    def tag(self) -> int: ...

    @tag.setter
    def tag(self, arg: int, /) -> None: ...

    @property
    def seq(self) -> int:
        """Of a message that is counted elsewhere."""

    @seq.setter
    def seq(self, arg: int, /) -> None: ...

    @property
    def part(self) -> Part | None: ...

    @part.setter
    def part(self, arg: Part | None, /) -> None: ...

    @property
    def work(self, /) -> Work | None:
        """Of a request that was submitted; None: nothing uses its memory yet."""

    @work.setter
    def work(self, arg: Work, /) -> None: ...

    @property
    def count(self) -> int:
        """Elements that all ranks must agree on."""

    def signature(self, seq: int) -> OpSignature:
        """What identifies it in messages."""

    def validate(self, rank: int, world_size: int) -> None:
        """Raises for what can be seen without any other rank."""

    def aliased_inputs(self, rank: int) -> list[int]:
        """
        Indices of inputs that would be overwritten before every rank has read them.
        """

    def trace_event(self) -> bytes:
        """What is recorded of it, packed."""

def itemsize(dtype: DType) -> int:
    """Bytes of one element."""

def supports(dtype: DType, op: ReduceOp) -> bool:
    """Whether the reduction is defined for the type."""

def reduces(op: Op) -> bool:
    """Whether an operation carries a reduction."""

def counts_must_agree(op: Op) -> bool:
    """Whether all ranks' buffers have one length."""

def accumulator_size(dtype: DType, op: ReduceOp) -> int:
    """Bytes in which a reduction keeps an element until it is complete."""

def combine(dtype: DType, op: ReduceOp, sources: Sequence[int], target: int, count: int, divisor: int, from_accumulators: bool, to_accumulators: bool = False) -> None:
    """
    Reduces along the tree over `sources`, and completes that unless the result stays in accumulators; the target may be one of the sources.
    """

def streaming_copy(target: int, source: int, nbytes: int) -> None:
    """Copies to memory that another process reads next."""

def narrow(dtype: DType, target: int, source: int, count: int) -> None:
    """Rounds float32 to a 16-bit type."""

def widen(dtype: DType, target: int, source: int, count: int) -> None:
    """Widens a 16-bit type to float32."""

class BlockFormat(enum.Enum):
    int8 = 0

    fp8 = 1

    int4 = 2

def blocks_nbytes(format: BlockFormat, count: int) -> int:
    """Bytes of float32 values in blocks."""

def pack_blocks(format: BlockFormat, target: int, source: int, count: int, residual: int = 0, seed: int | None = None) -> None:
    """
    Rounds float32 to blocks: stochastically if there is a seed, else to the nearest. A residual is added to the values before, and becomes what the rounding has left out.
    """

def unpack_blocks(format: BlockFormat, target: int, source: int, count: int) -> None:
    """Widens blocks to float32."""

TRACE_EVENTS: int = 32768

def initialize_segment(fd: int, rank: int, world_size: int, staging_bytes: int, error_prefix: str = '') -> int:
    """
    Sizes a memory file and writes its header, before the rendezvous; returns where its text about the rank goes, of at most FLIGHT_RANK_INFO_BYTES with the 0 that ends it.
    """

FLIGHT_RANK_INFO_BYTES: int = 4096

FLIGHT_FORMING_BYTES: int = 248

FLIGHT_SLOTS: tuple = (512, 256, 64)

def read_flight(fd: int) -> bytes:
    """
    `NativeGroup.flight` of a segment's file, of which nothing is believed.
    """

def take_report_signal(number: int, eventfd: int) -> bool:
    """
    Has a signal written to the descriptor, if nobody else handles or ignores it; whether so.
    """

def give_back_report_signal(number: int) -> None:
    """Undoes that, unless somebody else has taken the signal since."""

def give_back_pages(data: int, nbytes: int) -> None:
    """
    Frees whole pages of registered memory, for all who map it; they are zeros until written.
    """

def written_pages(view: int, nbytes: int) -> list[tuple[int, int]]:
    """
    [(start, stop)] in bytes of the pages that this process has written in a view, which no longer show what is written into the memory.
    """

def drop_pages(view: int, nbytes: int) -> None:
    """Lets pages of a view show the memory again."""

def api() -> int:
    """Address of the functions of sdp_api.h."""

def make_endpoint(submit: object) -> int:
    """
    An SdpEndpoint of a group whose operations are not the native group's own.
    """

class NativeGroup:
    """The ranks of a group on this node."""

    def __init__(self, rank: int, world_size: int, segment_fds: Sequence[int], sockets: Sequence[int], pidfds: Sequence[int], staging_bytes: int, spin_us: int = -1, ids: Sequence[int] = [], group_size: int = 0, token: int = 0, global_ranks: Sequence[int] = [], threads: int = 1) -> None:
        """
        Takes ownership of all file descriptors, also if it raises. `ids`: the ranks' places, where they are one node's share of a group of `group_size`. `global_ranks`: by which messages call the group's ranks, if not by these. `threads`: that share large operations.
        """

    def run(self, request: Request) -> None:
        """Blocks until the collective is done."""

    def submit(self, request: Request) -> Work:
        """Queues a collective, or posts a send or a receive."""

    def submit_at_flags(self, request: Request, flags: Sequence[tuple[int, int, int]]) -> Work:
        """
        Queues an all_reduce of each piece of the request, with (ready, done, value): it starts when the word at `ready` has come to `value`, and stores that at `done` at its end. Words and memory are borrowed until the last is done, whose Work this is.
        """

    def check_peers(self, operation: OpSignature, last_completed: OpSignature | None, elapsed_s: float) -> None:
        """Raises if a rank here has failed or ended, without waiting."""

    def set_waiting_remote(self, waits: bool) -> None:
        """
        Says whether this rank waits for one of another node; those here are patient then.
        """

    def fail(self, failure: Failure) -> None:
        """Fails the group for a reason found elsewhere; the first one stays."""

    def take_back(self, work: Work) -> int | None:
        """
        Ends a receive that no message has come for: its work is the caller's to finish. The ticket of its record; None if a message has come.
        """

    def others_have_left(self) -> None:
        """Says that no rank of another node sends any more."""

    def ended(self) -> list[int]:
        """The ranks of this node whose processes have ended."""

    def gone(self) -> list[int]:
        """The ranks of this node that have ended or left."""

    def add_region(self, address: int, nbytes: int, fd: int, offset: int) -> int:
        """
        Offers a shared mapping to the peers; returns its id. The fd is duplicated.
        """

    def remove_region(self, region: int) -> None: ...

    def allocate(self, nbytes: int, with_view: bool = False) -> tuple[int, int, int]:
        """
        (address, view, region) of zero-filled memory that peers can map; until `free`. The view, 0 if none is wanted, is copy on write: see written_pages().
        """

    def free(self, region: int) -> None: ...

    def map_region(self, rank: int, region: int) -> tuple[int, int, CapsuleType] | None:
        """
        (address, view, owner) of a region that a rank of this node has added; None if it is not known here. It stays mapped as long as the owner lives.
        """

    def abort(self, reason: str) -> None: ...

    def failure(self) -> BaseException | None:
        """Why the group is unusable, or None."""

    @property
    def failed(self) -> bool:
        """Whether it is."""

    def raise_if_failed(self) -> None: ...

    def start_trace(self) -> None:
        """Records operations from now on."""

    def stop_trace(self) -> None: ...

    @property
    def traced(self) -> bool: ...

    def trace_events(self) -> tuple[bytes, int]:
        """
        Recorded events, packed, oldest first; how many older ones were dropped.
        """

    def add_trace_event(self, event: bytes) -> None:
        """Records an event of an operation that is not run here."""

    def record(self, event: bytes, ticket: int = 0) -> int:
        """
        Shows such an event in the flight recorder, or its next version in the place that the ticket stands for; returns the ticket.
        """

    @property
    def token(self) -> int:
        """Of the group, on all its ranks."""

    def set_recording(self, on: bool) -> None:
        """Switches the flight recorder off, to measure what it costs."""

    def set_rank_info(self, text: bytes) -> None:
        """Replaces the text about this rank, see `initialize_segment`."""

    @property
    def error_prefix(self) -> str:
        """How messages begin: `[rank 3/8] `."""

    def set_error_prefix(self, text: str) -> None:
        """Changes it."""

    def show_forming(self, text: bytes, since_ns: int) -> None:
        """Shows that this process is making another group, since when; 0: none."""

    def flight(self, rank: int) -> bytes:
        """
        What a rank of this node shows of itself and its last operations: see FlightHead.
        """

    def counters(self, rank: int) -> bytes:
        """What a rank of this node has counted: see FlightCounters."""

    def close(self) -> None: ...

    def endpoint(self) -> int:
        """A new SdpEndpoint, which is never freed."""

    def explain(self, op: Op, nbytes: int, registered: bool) -> str:
        """See the function of this name."""

    @property
    def issued(self) -> int: ...

    @property
    def last_path(self) -> str: ...

class NativeFusionBuffer:
    """Balanced fusion buffers."""

    def __init__(self, group: NativeGroup, tensors: Sequence[tuple[int, DType]], threshold_bytes: int, op: ReduceOp, timeout_s: float, submit: object | None = None) -> None:
        """
        `submit`: takes the buffers' operations, where they are not the native group's own.
        """

    def ready(self, tensor: int, address: int) -> None: ...

    def finish(self) -> None: ...

    def buckets(self) -> list[list[int]]:
        """Indices of the tensors in each buffer."""

class DeviceStreams:
    """A device's streams for copies down and up."""

    def __init__(self, copy_down: int, copy_up: int, write: int, wait: int, down: int, up: int) -> None:
        """
        The driver's functions, by address, and its handles of the two streams.
        """

    def copy_down(self, pieces: Sequence[tuple[int, int, int, tuple[int, int, int]]]) -> int:
        """
        Enqueues the copy of each (device, staging, nbytes, (ready, done, value)) to staging memory, and `ready`; returns the driver's error code.
        """

    def copy_up(self, pieces: Sequence[tuple[int, int, int, tuple[int, int, int]]]) -> int:
        """
        Enqueues, for each piece, to wait for `done`, and the copy back; likewise.
        """

def path_name(path: int) -> str:
    """What `last_path` calls the path of a traced event."""

def explain(op: Op, nbytes: int, registered: bool) -> str:
    """The path for an operation in which each rank shows `nbytes`, and why."""

def address(exporter: object, writable: bool = False) -> int:
    """
    Where a contiguous object's memory lies, by the buffer protocol, which refuses others.
    """

def inspect(array: object) -> tuple[int, list[int], list[int], int, int, bool]:
    """
    (address, shape, strides in elements, DLPack type code, bits, writable) of an array.
    """
