"""Tensor parallelism over torch.distributed: the model's collectives, and the channel of rank 0's steps.

Every rank holds its share of the heads, the MLPs and the output head's rows (`realengine.weights.table`) and
of the KV cache, and runs every step. The ranks' outputs are summed twice per block (Shoeybi et al. 2019),
after `o` and after `down`; logits are gathered. Only rank 0 runs EngineCore. The others wait for its steps in
`follow`. All ranks have all logits and draw the same tokens with the same seeds, so nothing is sent back.

There is a communicator for each kind of group: NCCL for tensors on GPUs (gloo on CPUs), bound to the rank's
device, and gloo between the hosts. NCCL in CUDA graphs (as documented by NVIDIA, not run on GPUs): a captured
step calls only `all_reduce` and `all_gather`, which do not wait for the device; each captured shape runs once
before, and the capture's error mode is thread_local, because torch's watchdog thread queries events.

A rank that dies leaves the others in a collective. Rank 0 watches the processes and aborts the communicator;
the other ranks meet a closed connection when they wait for the next step. A rank that hangs ends the
processes after `COLLECTIVE_TIMEOUT`, as torch does by default, so that no wrong token is sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CONNECT_TIMEOUT = timedelta(minutes=10)
# Of a collective on the device; loading and capturing differ by less between ranks.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
# An idle engine sends no steps. A rank that dies closes its connections, which ends the others at once.
IDLE_TIMEOUT = timedelta(days=30)
STEP_WORDS = 4096
STOP = -1
# The name since torch 2.13, which warns about the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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
                        f"tensor parallel ranks differ: {name} is {fact} on rank 0 and {others.get(name)} on "
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


def connect(rank: int, world_size: int, device: torch.device, address: str) -> Group:
    """Joins the ranks of one model, each in its own process; returns when all have joined.

    device: this rank's (cuda:rank, or cpu). address: the rendezvous, "tcp://host:port" or "file:///path" of a
    file that does not exist yet. Raises ValueError for a rank outside the world, RuntimeError if a rank is
    missing after 10 minutes.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: must be in 0 .. world_size - 1, world_size={world_size}")
    if world_size == 1:
        return Group()
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
    tensors = dist.new_group(backend=backend_of(device), timeout=COLLECTIVE_TIMEOUT, group_desc="tensor")
    hosts = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT, group_desc="hosts")
    return Group(rank, world_size, tensors, hosts)


def check_alone() -> None:
    """Raises ValueError if this process already belongs to a group, of which torch has one per process.

    A group whose engine is no longer used, but in a cycle of references, is left first.
    """
    if dist.is_initialized():
        gc.collect()
    if dist.is_initialized():
        raise ValueError(
            "tensor_parallel_size: this process has another engine with several ranks; delete that first, or "
            "use another process"
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
    """Runs each step of rank 0 as it arrives, on ranks above 0, until rank 0 stops."""
    while (step_words := channel.receive()) is not None:
        run(step_words)
