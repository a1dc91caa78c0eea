"""The ranks of one model over torch.distributed: groups by kind of parallelism, and the channels of steps.

Only rank 0 runs EngineCore. The others wait for its steps in `follow`, and every rank runs every step.

    tensor     each rank holds its share of the heads, the MLPs and the output head's rows
               (`realengine.weights.table`) and of the KV cache. Outputs are summed twice per block (Shoeybi
               et al. 2019), after `o` and after `down`; logits are gathered. All ranks have all logits and
               draw the same tokens with the same seeds
    data       each rank has sequences of its own, and their KV; the experts are shared
               (`realengine.model.token_exchange`)
    context    each rank has a share of the tokens of prompts, and all KV (`realengine.model.context_cut`)
    pipeline   each stage holds some of the layers and their KV. A batch's hidden states go from stage to
               stage, to the same rank of the next one; the last stage draws, and its first rank sends the
               tokens to rank 0, which meanwhile begins as many batches as there are stages

Ranks are numbered stage by stage: with two stages of two ranks, stage 1 has the ranks 2 and 3.

There is a communicator for each kind of group: NCCL for tensors on GPUs (gloo on CPUs), bound to the rank's
device, and gloo between the hosts. NCCL in CUDA graphs (as documented by NVIDIA, not run on GPUs): a captured
step calls only `all_reduce` and `all_gather`, which do not wait for the device; each captured shape runs once
before, and the capture's error mode is thread_local, because torch's watchdog thread queries events. NCCL
between stages was not run on GPUs either: sends and receives are on one stream each way, and a batch never
goes back, so that no two ranks wait for each other.

A rank that dies leaves the others in a collective. Rank 0 watches the processes and aborts the communicator;
the other ranks meet a closed connection when they wait for the next step. A rank that hangs ends the
processes after `COLLECTIVE_TIMEOUT`, as torch does by default, so that no wrong token is sent.
"""

from __future__ import annotations

import gc
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hwmodels.iterations.layout import ParallelLayout
from policies.placement.experts import Slots
from realengine.weights.table import ExpertShare

CONNECT_TIMEOUT = timedelta(minutes=10)
# Of a collective on the device; loading and capturing differ by less between ranks.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# An idle engine sends no steps. A rank that dies closes its connections, which ends the others at once.
IDLE_TIMEOUT = timedelta(days=30)
STEP_WORDS = 4096
STOP = -1
# The name since torch 2.13, which warns about the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Group:
    """One rank of a group of ranks; with one rank, each collective returns its input."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, tensors: Any | None = None, hosts: Any | None = None
    ) -> None:
        """Creates a group. tensors, hosts: process groups of `connect`; None with one rank."""
        self.rank = rank
        self.world_size = world_size
        self._tensors = tensors
        self._hosts = hosts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(x, group=self._tensors)
        return x

    def all_gather(self, x_SN: torch.Tensor) -> torch.Tensor:
        """Gathers [S, world_size * N]: the ranks' columns in order of rank."""
        if self.world_size == 1:
            return x_SN
        num_rows, num_columns = x_SN.shape
        gathered = x_SN.new_empty(self.world_size * num_rows, num_columns)
        _all_gather(gathered, x_SN.contiguous(), group=self._tensors)
        return gathered.view(self.world_size, num_rows, num_columns).transpose(0, 1).reshape(num_rows, -1)

    def gather_rows(self, x_SN: torch.Tensor) -> torch.Tensor:
        """Gathers [world_size * S, N]: the ranks' rows in order of rank."""
        gathered = x_SN.new_empty(self.world_size * len(x_SN), *x_SN.shape[1:])
        _all_gather(gathered, x_SN.contiguous(), group=self._tensors)
        return gathered

    def reduce_scatter(self, x_SN: torch.Tensor) -> torch.Tensor:
        """Sums over the ranks, and returns this rank's part of the rows [S / world_size, N]."""
        own = x_SN.new_empty(len(x_SN) // self.world_size, *x_SN.shape[1:])
        _reduce_scatter(own, x_SN.contiguous(), group=self._tensors)
        return own

    def all_to_all(self, x: torch.Tensor, taken: list[int] | None, given: list[int] | None) -> torch.Tensor:
        """Sends rows to each rank, in their order, and returns those that the ranks send to this one.

        taken, given: numbers of rows of each rank; None: equally many.
        """
        found = x.new_empty(len(x) if taken is None else sum(taken), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), taken, given, group=self._tensors)
        return found

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        """Sends tensors to ranks of the group, and fills others with what ranks send to this one.

        Two ranks must name the tensors that go from one to the other in the same order.
        """
        group: Any = self._tensors

        def operation(of: Callable[..., Any], tensor: torch.Tensor, rank: int) -> dist.P2POp:
            return dist.P2POp(of, tensor, dist.get_global_rank(group, rank), group)

        operations = [operation(dist.isend, *each) for each in sends]
        operations += [operation(dist.irecv, *each) for each in receives]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def broadcast(self, words: torch.Tensor) -> torch.Tensor:
        """Copies rank 0's tensor to all ranks, in place, on the CPU."""
        if self.world_size > 1:
            dist.broadcast(words, src=0, group=self._hosts)
        return words

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Raises RuntimeError, on every rank, if the ranks' facts differ: sizes, versions, settings."""
        if self.world_size == 1:
            return
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, {name: str(fact) for name, fact in facts.items()}, group=self._hosts)
        for rank, others in enumerate(found):
            for name, fact in found[0].items():
                if others.get(name) != fact:
                    raise RuntimeError(
                        f"ranks differ: {name} is {fact} on rank 0 and {others.get(name)} on "
                        f"rank {rank}; start all ranks with the same software, model folder and kind of GPU"
                    )

    def abort(self) -> None:
        """Ends the collectives that wait on the device for a rank that does not come; the group is unusable.

        Results of steps in flight are then undefined.
        """
        abort = getattr(self._tensors, "abort", None)
        if abort is not None:
            with suppress(RuntimeError, NotImplementedError):  # gloo has none: it meets a closed connection
                abort()

    def smallest(self, number: int) -> int:
        """Returns the minimum of the ranks' numbers, such as the KV blocks that fit on all of them."""
        if self.world_size == 1:
            return number
        least = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._hosts)
        return int(least)


class Place(NamedTuple):
    """The place of a rank in a layout."""

    stage: int
    data: int
    context: int
    tensor: int

    @classmethod
    def of(cls, rank: int, layout: ParallelLayout) -> Place:
        """Returns the place of a rank. Raises ValueError for a rank outside the layout."""
        if not 0 <= rank < layout.num_devices:
            raise ValueError(f"rank={rank}: must be in 0 .. world_size - 1, world_size={layout.num_devices}")
        rank, tensor = divmod(rank, layout.tensor_parallel_size)
        rank, context = divmod(rank, layout.context_parallel_size)
        return cls(*divmod(rank, layout.attention_data_parallel_size), context, tensor)

    @staticmethod
    def drawing(layout: ParallelLayout) -> list[int]:
        """Returns the ranks that draw for rank 0: the first of each data-parallel rank, in the last stage."""
        first = (layout.pipeline_parallel_size - 1) * layout.stage_size
        stride = layout.tensor_parallel_size * layout.context_parallel_size
        return [*range(first, first + layout.stage_size, stride)]

    @staticmethod
    def name_of(rank: int, layout: ParallelLayout) -> str:
        """Returns a rank's name for messages: rank 3 (pipeline stage 1, tensor parallel rank 1)."""
        place, sizes = Place.of(rank, layout), Place.sizes(layout)
        names = (
            "pipeline stage",
            "attention data parallel rank",
            "context parallel rank",
            "tensor parallel rank",
        )
        parts = [f"{name} {at}" for name, at, size in zip(names, place, sizes, strict=True) if size > 1]
        return f"rank {rank} ({', '.join(parts)})"

    @staticmethod
    def sizes(layout: ParallelLayout) -> tuple[int, ...]:
        """Returns the number of ranks in each direction."""
        return (
            layout.pipeline_parallel_size,
            layout.attention_data_parallel_size,
            layout.context_parallel_size,
            layout.tensor_parallel_size,
        )


class Stage:
    """A rank's stage of a pipeline: its layers, and the ranks before and behind it."""

    def __init__(
        self, layers: range, num_layers: int, rank: int = 0, stride: int = 1, group: Any | None = None
    ) -> None:
        """Creates a stage.

        rank: this rank's number among all, stride: of the next stage's rank minus it. group: the process
        group of tensors among all ranks; None with one stage.
        """
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == num_layers
        self._before, self._behind = rank - stride, rank + stride
        self._group = group
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    @classmethod
    def whole(cls, num_layers: int) -> Stage:
        """Returns the only stage of a model."""
        return cls(range(num_layers), num_layers)

    def receive(self, both_2TH: torch.Tensor) -> torch.Tensor:
        """Fills a tensor with what the stage before sends: its last MLP's output, and the residual."""
        dist.recv(both_2TH, src=self._before, group=self._group)
        return both_2TH

    def send(self, both_2TH: torch.Tensor) -> None:
        """Sends the last MLP's output, and the residual to add to it; does not wait for the next stage."""
        _send(self._sent, both_2TH, self._behind, self._group)


MOST_SENDS = 64
"""Sends of a rank that may be under way; more than there are batches in flight, so that none is awaited."""


def _send(sent: deque[tuple[Any, torch.Tensor]], tensor: torch.Tensor, rank: int, group: Any) -> None:
    """Sends a tensor, and keeps it until it has left."""
    sent.append((dist.isend(tensor, dst=rank, group=group), tensor))
    while len(sent) > MOST_SENDS:
        sent.popleft()[0].wait()


class Answers:
    """A channel on which a rank tells rank 0 what it has drawn in each step, in their order."""

    def __init__(self, rank: int, group: Any) -> None:
        """Creates one end. rank: the other end's. group: a process group of the hosts of all ranks."""
        self._rank = rank
        self._group = group
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, answer: object) -> None:
        """Sends an object to rank 0; does not wait for it."""
        pickled = np.frombuffer(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)
        _send(self._sent, torch.tensor([len(pickled)]), self._rank, self._group)
        _send(self._sent, torch.from_numpy(pickled.copy()), self._rank, self._group)

    def receive(self) -> Any:
        """Waits for the next object of the last stage. Raises RuntimeError if its process has ended."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, src=self._rank, group=self._group)
        pickled = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(pickled, src=self._rank, group=self._group)
        return pickle.loads(pickled.numpy().tobytes())  # nosec B301 (sent by a rank of this engine)


class ExpertRanks(NamedTuple):
    """The ranks of a stage as those of its experts: expert-parallel ones, and those that share an expert."""

    slots: Slots
    """The experts of the slots of each expert-parallel rank, as they are loaded."""
    rank: int
    size: int
    """Expert-parallel ranks."""
    share: int
    num_shares: int
    """Ranks with the same experts, each of which has a share of their matrices."""
    group: Group
    """The ranks of the stage."""

    @classmethod
    def of(cls, slots: Slots, group: Group) -> ExpertRanks:
        """Returns the ranks of a stage, of which neighbours share the same experts."""
        size = len(slots)
        num_shares = group.world_size // size
        rank, share = divmod(group.rank, num_shares)
        return cls(slots, rank, size, share, num_shares, group)

    @property
    def loaded(self) -> ExpertShare:
        """Returns what this rank loads of the experts."""
        return ExpertShare(self.slots[self.rank], self.share, self.num_shares)

    def peer(self, rank: int) -> int:
        """Returns the number, within the stage, of the rank with this one's share of another's experts."""
        return rank * self.num_shares + self.share


class Mesh(NamedTuple):
    """The groups that a rank is in."""

    everyone: Group
    """All ranks of the model, for what their hosts agree on."""
    tensor: Group
    """The ranks that share each layer of this rank's stage."""
    stage: Stage
    peers: Group
    """All ranks of this rank's stage."""
    data: Group
    """The ranks of the stage with other sequences, and with the same number among their tensor ranks."""
    context: Group
    """The ranks of the stage that divide the tokens of prompts."""
    answers: tuple[Answers | None, ...] = ()
    """On rank 0, those of each data-parallel rank that draws elsewhere; there, the one to rank 0."""

    def abort(self) -> None:
        """Ends the collectives that wait on the device for a rank that does not come."""
        for group in (self.tensor, self.peers, self.data, self.context):
            group.abort()

    @classmethod
    def alone(cls, num_layers: int) -> Mesh:
        """Returns the groups of the only rank of a model."""
        return cls(Group(), Group(), Stage.whole(num_layers), Group(), Group(), Group())


def connect(rank: int, layout: ParallelLayout, num_layers: int, device: torch.device, address: str) -> Mesh:
    """Joins the ranks of one model, each in its own process; returns when all have joined.

    device: this rank's (cuda:rank, or cpu). address: the rendezvous, "tcp://host:port" or "file:///path" of a
    file that does not exist yet. Raises ValueError for a rank outside the layout, RuntimeError if a rank is
    missing after 10 minutes.
    """
    place, world_size = Place.of(rank, layout), layout.num_devices
    if world_size == 1:
        return Mesh.alone(num_layers)
    on_gpu = device.type == "cuda"
    if on_gpu and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group(
        backend_of(device),
        init_method=address,
        rank=rank,
        world_size=world_size,
        timeout=CONNECT_TIMEOUT,
        device_id=device if on_gpu else None,
    )

    def group_of(name: str, backend: str, timeout: timedelta, size: int = world_size, stride: int = 1) -> Any:
        """Returns this rank's group of `size` ranks, `stride` apart; every rank must make all of them."""
        mine = None
        for first in range(world_size):
            if first // stride % size:
                continue
            ranks = list(range(first, first + size * stride, stride))
            made = dist.new_group(ranks, backend=backend, timeout=timeout, group_desc=name)
            mine = made if rank in ranks else mine
        return mine

    def tensors_of(name: str, at: int, size: int, stride: int = 1) -> Group:
        """Returns this rank's group of `size` ranks for tensors, in which its number is `at`."""
        if size == 1:
            return Group()
        return Group(at, size, group_of(name, backend_of(device), COLLECTIVE_TIMEOUT, size, stride))

    tensor_size, data_size = layout.tensor_parallel_size, layout.attention_data_parallel_size
    context_size = layout.context_parallel_size
    tensor = peers = tensors_of("tensor", place.tensor, tensor_size)
    context = tensors_of("context", place.context, context_size, tensor_size)
    data = tensors_of("data", place.data, data_size, tensor_size * context_size)
    if data_size > 1:
        peers = tensors_of("peers", rank % layout.stage_size, layout.stage_size)
    everyone = Group(rank, world_size, None, group_of("hosts", "gloo", IDLE_TIMEOUT))
    drawing = Place.drawing(layout)
    answers: tuple[Answers | None, ...] = ()
    if drawing != [0]:
        answers = _answers(rank, drawing, group_of("answers", "gloo", COLLECTIVE_TIMEOUT))
    stage = Stage.whole(num_layers)
    if layout.pipeline_parallel_size > 1:
        between = group_of("stages", backend_of(device), COLLECTIVE_TIMEOUT)
        stage = Stage(
            layers_of(layout, num_layers, place.stage), num_layers, rank, layout.stage_size, between
        )
    return Mesh(everyone, tensor, stage, peers, data, context, answers)


def layers_of(layout: ParallelLayout, num_layers: int, stage: int) -> range:
    """Returns the layers of a pipeline stage."""
    sizes = layout.stage_layers(num_layers)
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def _answers(rank: int, drawing: list[int], group: Any) -> tuple[Answers | None, ...]:
    """Returns this rank's ends of the channels from the ranks that draw to rank 0, which may draw, too."""
    if rank == 0:
        return tuple(Answers(other, group) if other else None for other in drawing)
    return (Answers(0, group),) if rank in drawing else ()


def check_alone() -> None:
    """Raises ValueError if this process already belongs to a group, of which torch has one per process.

    A group whose engine is no longer used, but in a cycle of references, is left first.
    """
    if dist.is_initialized():
        gc.collect()
    if dist.is_initialized():
        raise ValueError(
            "this process has another engine with several ranks; delete that first, or use another process"
        )


def backend_of(device: torch.device) -> str:
    """Returns the backend of torch.distributed for tensors on a device."""
    return "nccl" if device.type == "cuda" else "gloo"


def disconnect() -> None:
    """Leaves the group; every rank calls it after its last collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


class StepChannel:
    """Sends rank 0's steps, int32 words on the host, to all other ranks.

    One broadcast for a step of up to `first_words` - 1 words, two for a longer one:
    | number of words | the first words of the step ... |   | the rest |
    """

    def __init__(self, group: Group, first_words: int = STEP_WORDS) -> None:
        self._group = group
        self._first = torch.zeros(first_words, dtype=torch.int32)

    def send(self, step_words: torch.Tensor) -> None:
        """Sends a step, int32 [words] on the CPU, from rank 0; does nothing if there is one rank."""
        if self._group.world_size == 1:
            return
        size, room = len(step_words), len(self._first) - 1
        self._first[0] = size
        self._first[1 : 1 + min(size, room)] = step_words[:room]
        self._group.broadcast(self._first)
        if size > room:
            self._group.broadcast(step_words[room:].contiguous())

    def stop(self) -> None:
        """Tells the other ranks, from rank 0, that there are no more steps."""
        self._first[0] = STOP
        self._group.broadcast(self._first)

    def receive(self) -> torch.Tensor | None:
        """Waits for the next step on another rank; returns None if there are no more."""
        self._group.broadcast(self._first)
        size, room = int(self._first[0]), len(self._first) - 1
        if size == STOP:
            return None
        step_words = torch.empty(size, dtype=torch.int32)
        step_words[:room] = self._first[1 : 1 + min(size, room)]
        if size > room:
            rest = torch.empty(size - room, dtype=torch.int32)
            step_words[room:] = self._group.broadcast(rest)
        return step_words


def follow(channel: StepChannel, run: Callable[[torch.Tensor], object]) -> None:
    """Runs each step of rank 0, on ranks above 0, in their order until rank 0 stops.

    Steps are received while others run, so that rank 0 does not wait for the later stages of a pipeline.
    """
    steps: SimpleQueue[torch.Tensor | BaseException | None] = SimpleQueue()

    def receive() -> None:
        try:
            while (step_words := channel.receive()) is not None:
                steps.put(step_words)
            steps.put(None)
        except RuntimeError as error:  # rank 0 has ended
            steps.put(error)

    Thread(target=receive, daemon=True).start()
    while (step := steps.get()) is not None:
        if isinstance(step, BaseException):
            raise step
        run(step)
