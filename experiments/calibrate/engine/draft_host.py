"""Host time of a step with draft tokens, beyond that of a plain step, by what drafts.

An engine of windtunnel serves texts that are written in advance: a stand-in of the executor accepts the draft
tokens that agree with them. n-grams and suffixes are searched on the host. For all other proposers the host
has the same work, so one stands for them. Half of the passages of a text are copies, of earlier ones or of
those of an earlier answer, so that searches find matches of many lengths, and none. As in `host_time`, a step
of the model runs in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import trim_mean

from experiments.calibrate.engine.host_time import HostClock, HostTime, core_settings
from experiments.calibrate.engine.served import Served
from experiments.calibrate.engine.steps import REFERENCE
from hwmodels.fitting.robust import fit_terms
from hwmodels.speculation.steps import OTHERS, DraftHost
from policies.core.engine import EngineCore
from policies.speculation import Proposer
from policies.speculation.proposers import Ngram, SelfSpeculative, Suffix
from realengine.clock import ThreadTimeClock
from realengine.engine import Engine
from realengine.runner.graphs import Drawn
from realengine.runner.runner import Runner
from realengine.runner.work import ON_DEVICE, StepWords, Work
from realengine.serving.sampling_params import SamplingParams
from realengine.speculation.drafting import core_of
from realengine.speculation.settings import SpeculationSettings

RUNS = ((1, 32, 4), (1, 2048, 8), (4, 32, 8), (4, 2048, 2), (12, 32, 2), (12, 2048, 8), (24, 32, 4))
"""Sequences, prompt tokens and draft tokens of the measured engines: each varies without the others."""
STEPS = 24
WARM_UP = 4
PASSAGE = 32
EARLIER = 512
"""Tokens of an answer that is complete before the measured requests begin."""
VOCABULARY = 4096
CUT = 0.1
"""Share of the fastest steps, and of the slowest, that do not count."""


class Measured(NamedTuple):
    """A measured step with draft tokens, on average over those of a run."""

    num_seqs: int
    num_drafts: float
    """Draft tokens that are verified, of all sequences together."""
    num_context_tokens: float
    """Those of all sequences together."""
    seconds: float


class DraftHostTime(NamedTuple):
    """The host time that draft tokens add to a step, and the measured steps, whole.

    undetermined: ranges of figures that the steps do not determine.
    """

    host: DraftHost
    steps: list[Measured]
    undetermined: Mapping[str, tuple[float, float]] = MappingProxyType({})


def measure_draft_host(
    plain: HostTime, block_size: int, served: Served | None = None, usual_s: float | None = None
) -> dict[str, DraftHostTime]:
    """Measures the host time of steps with draft tokens beyond that of plain ones, by what drafts.

    served, usual_s: see `measure_host`.
    """
    found = {}
    for name in ("ngram", "suffix", OTHERS):
        steps = [_step(name, *run, block_size, served, usual_s) for run in RUNS]
        found[name] = fitted(steps, plain, searches=name != OTHERS)
    return found


def fitted(steps: list[Measured], plain: HostTime, *, searches: bool) -> DraftHostTime:
    """Fits what steps take beyond plain ones; relative errors of whole steps are minimised.

    searches: whether the host searches contexts, so that their length counts.
    """
    seqs, drafts, context, seconds = np.array(steps).T
    terms = {"iteration_s": 1.0, "sequence_s": seqs, "token_s": drafts}
    if searches:
        terms["kilotoken_s"] = 1e-3 * context
    found = fit_terms(terms, seconds, known=plain.iteration_s + plain.sequence_s * seqs)
    return DraftHostTime(DraftHost(**found.values), steps, found.undetermined)


def _step(
    name: str,
    num_seqs: int,
    num_prompt_tokens: int,
    num_drafts: int,
    block_size: int,
    served: Served | None,
    usual_s: float | None,
) -> Measured:
    """Measures the decode steps of an engine that speculates."""
    proposer = _proposer(name, num_drafts)
    num_tokens = num_prompt_tokens + (STEPS + WARM_UP + 1) * (1 + proposer.num_speculative_tokens)
    earlier = _text(num_prompt_tokens + EARLIER, 0)
    texts = [_text(num_tokens, 1 + seq, earlier[num_prompt_tokens:]) for seq in range(num_seqs)]
    clock = HostClock(served, usual_s)
    engine, passes = engine_of_texts(proposer, [earlier, *texts], num_prompt_tokens, block_size, clock)
    add_texts(engine, [earlier], num_prompt_tokens)
    while engine.num_unfinished:
        engine.step()
    add_texts(engine, texts, num_prompt_tokens)
    while passes.num_decodes < num_seqs:
        engine.step()
    passes.between = served
    found = [(clock.step_s(engine), passes.num_drafts, passes.num_tokens) for _ in range(WARM_UP + STEPS)]
    seconds, drafts, context = (float(trim_mean(each, CUT)) for each in zip(*found[WARM_UP:], strict=True))
    return Measured(num_seqs, drafts, context, seconds / clock.pace(slice(-STEPS, None)))


def engine_of_texts(
    proposer: Proposer,
    texts: list[NDArray[np.int64]],
    num_prompt_tokens: int,
    block_size: int,
    clock: HostClock,
) -> tuple[Engine, Passes]:
    """Returns an engine for requests with these texts, and what stands for its executor.

    num_prompt_tokens: the first tokens of each text, which are the prompt; the others are the answer.
    """
    settings, of_clock = SpeculationSettings(proposer=proposer), ThreadTimeClock()
    sizes = core_settings(len(texts), max(map(len, texts)), block_size)
    core, drafting = core_of(settings, of_clock, overlap=False, vocab_size=VOCABULARY, **sizes)
    assert drafting is not None
    passes = Passes(core, texts, num_prompt_tokens)
    execute = clock.around(passes.execute)
    runner = Runner(core, execute, drafts=drafting.packer(execute, None))
    engine = Engine(core, runner, vocab_size=VOCABULARY, drafting=drafting)
    return engine, passes


def add_texts(engine: Engine, texts: list[NDArray[np.int64]], num_prompt_tokens: int) -> None:
    """Adds the requests of the next texts to an engine of texts."""
    for text in texts:
        params = SamplingParams(temperature=0.0, max_tokens=len(text) - num_prompt_tokens, ignore_eos=True)
        engine.add(text[:num_prompt_tokens].tolist(), params)


def _proposer(name: str, num_drafts: int) -> Proposer:
    if name == "ngram":
        return Ngram(draft=None, num_speculative_tokens=num_drafts, prompt_lookup_max=3, prompt_lookup_min=1)
    if name == "suffix":
        return Suffix(draft=None, num_speculative_tokens=3 * num_drafts)  # it drafts fewer than it may
    return SelfSpeculative(draft=None, num_speculative_tokens=num_drafts)


def _text(num_tokens: int, seed: int, other: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Returns token ids in passages; half are copies, of earlier ones or of those of another text."""
    random = np.random.default_rng(seed)
    passages = [random.integers(VOCABULARY, size=PASSAGE)]
    others = [] if other is None else [other[at : at + PASSAGE] for at in range(0, len(other), PASSAGE)]
    while sum(map(len, passages)) < num_tokens:
        kind = random.random()
        if kind < 0.25 and others:
            passages.append(others[random.integers(len(others))])
        elif kind < 0.5:
            passages.append(passages[random.integers(len(passages))])
        else:
            passages.append(random.integers(VOCABULARY, size=PASSAGE))
    return np.concatenate(passages)[:num_tokens]


class Passes:
    """Stands for an executor: accepts the draft tokens that agree with the texts of the requests.

    texts: by request id. Of draft tokens that the device would make, half are accepted.
    """

    def __init__(self, core: EngineCore, texts: list[NDArray[np.int64]], num_prompt_tokens: int) -> None:
        self._core, self._texts = core, texts
        self._num_known = [num_prompt_tokens] * len(texts)  # tokens, by request id
        self.between: Served | None = None
        """Runs its reference step in each pass; None: nothing runs."""
        self.num_decodes = 0
        """Sequences that decode in the last pass; the next figures are of the same pass."""
        self.num_drafts = 0
        self.num_tokens = 0

    def execute(self, work: Work) -> Drawn | None:
        """Returns the tokens of a pass, and how many drafts each of its sequences accepts."""
        shape = work.shape
        assert shape is not None
        assert shape.drafts is not None
        assert work.words is not None
        if self.between is not None:
            self.between.plain.run(self.between.work(REFERENCE))
        views = StepWords.of(torch.from_numpy(work.words), shape)
        self.num_decodes = shape.num_decodes
        self.num_drafts = shape.drafts.num_decode_tokens - shape.num_decodes
        self.num_tokens = sum(self._num_known[seq.request_id] for seq in self._core.running.values())
        if not shape.num_drawn:
            return None
        tokens, starts = views.tokens_T.numpy(), views.starts_B.tolist()
        request_of = {seq.slots[0]: seq.request_id for seq in self._core.running.values()}
        drawn_SD = np.zeros((shape.num_drawn, shape.drafts.max_depth + 1), np.int64)
        accepted_S = np.zeros(shape.num_drawn, np.int64)
        for index, slot in enumerate(views.drawn_slots_S.tolist()):
            request = request_of[slot]
            known, text = self._num_known[request], self._texts[request]
            following = text[known : known + drawn_SD.shape[1]]
            drawn_SD[index, : len(following)] = following
            if index < shape.num_decodes:
                drafts = tokens[starts[index] + 1 : starts[index + 1]]
                accepted_S[index] = _num_accepted(drafts, following)
            self._num_known[request] += int(accepted_S[index]) + 1
        return Drawn(
            torch.from_numpy(np.ascontiguousarray(drawn_SD.T)), accepted_IS=torch.from_numpy(accepted_S)[None]
        )


def _num_accepted(drafts: NDArray[np.int32], following: NDArray[np.int64]) -> int:
    if len(drafts) and drafts[0] == ON_DEVICE:
        return len(drafts) // 2
    num_known = min(len(drafts), len(following))  # a draft may go on beyond the end of the text
    differ = np.flatnonzero(drafts[:num_known] != following[:num_known])
    return int(differ[0]) if len(differ) else num_known
