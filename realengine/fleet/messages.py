"""The messages between a fleet and the processes of its engines. They are pickled over pipes."""

from __future__ import annotations

from typing import NamedTuple

from policies.gateway.signals import Counts
from realengine.serving.answer import DraftCounts, Output, TokenLogprobs
from realengine.serving.sampling_params import SamplingParams

# To an engine.


class Submit(NamedTuple):
    """A request. Times are seconds on the clock of the machine (time.monotonic).

    known: what a lost engine has generated, after which the only output goes on; None: it begins.
    """

    request_id: int
    tokens: list[int]
    params: SamplingParams
    priority: int
    tenant: str
    lora: str | None
    cache_salt: str
    arrival_s: float
    deadline_s: float | None
    known: Output | None = None


class Abort(NamedTuple):
    """Aborts a request; nothing happens if it has ended."""

    request_id: int


class ClearCache(NamedTuple):
    """Evicts, before the next step, the KV that no running request uses."""


class Sleep(NamedTuple):
    """Frees the memory of the device; the engine has no requests. level: see `realengine.sleep`."""

    level: int


class WakeUp(NamedTuple):
    """Tells a sleeping engine to load its weights and serve again."""


class Stop(NamedTuple):
    """Tells the process of an engine to abort its requests and exit."""


ToEngine = Submit | Abort | ClearCache | Sleep | WakeUp | Stop


# From an engine.


class Started(NamedTuple):
    """The engine is loaded and warm, with the sizes that the gateway needs."""

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    start_s: dict[str, float]


class Failed(NamedTuple):
    """The engine cannot start, or cannot go on; its process ends."""

    reason: str


class Began(NamedTuple):
    """An iteration begins, or the policies have found nothing to do.

    stored, removed: the blocks that the prefix cache offers from now on, and those that it has dropped, by
    the hash of their chain of tokens.
    """

    counts: Counts
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


class Grown(NamedTuple):
    """The new part of one output.

    number: its index among those of its request. text: all of it so far, if the request has stop strings.
    """

    number: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    text: str | None


class Progress(NamedTuple):
    """The progress of one request in a step. outputs: those with something new; at the end all of them.

    error: why it has ended without an output. is_refused: the engine can never serve it. is_whole: the
    outputs are complete and replace what was sent before, as those of a beam search.
    """

    request_id: int
    outputs: tuple[Grown, ...]
    is_finished: bool = False
    error: str | None = None
    is_refused: bool = False
    is_whole: bool = False
    num_cached_tokens: int = 0
    drafts: DraftCounts | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Stepped(NamedTuple):
    """The requests that a step has changed. busy_s: seconds of all steps so far."""

    progress: tuple[Progress, ...]
    busy_s: float


class Changed(NamedTuple):
    """The engine sleeps, or is awake again. error: why it is not."""

    is_asleep: bool
    error: str | None = None


FromEngine = Started | Failed | Began | Stepped | Changed
