"""Checks on the device that speculation changes no greedy token, for every way to draft, in fp32.

The reference is the same engine without speculation. A draft model with the target's own weights drafts what
the target draws, so that drafts are accepted; other drafts of random weights are rejected nearly always.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from experiments.gpu.engine_correct import agreement
from experiments.gpu.engine_models import SMALL, TINY, Request, params_of, random_requests, served
from experiments.gpu.record import Record
from policies.speculation.adaptive import Adaptive
from policies.speculation.by_batch_size import ByBatchSize
from realengine.model.architecture import Architecture

TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)]
CHAINS = (1, 4, 8)
COMMON: Mapping[str, Any] = {
    "dtype": "float32",
    "backend": "triton",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "num_kv_blocks": 1200,
}


class Served(NamedTuple):
    """Output tokens of all requests, and the counts of their draft tokens."""

    tokens: list[tuple[int, ...]]
    num_drafts: int
    num_accepted: int


def run(record: Record) -> None:
    """Adds one row per way to draft, with the share of requests whose tokens all equal the reference's."""
    architecture = TINY if record.quick else SMALL
    if record.quick:
        requests = random_requests(record.seed, 2, (1, 12), 3, architecture.vocab_size)
    else:
        requests = repetitive(random_requests(record.seed, 24, (1, 60), 32, architecture.vocab_size))
    expected: list[Served] = []

    def reference() -> dict[str, Any]:
        expected.append(_served(record, architecture, requests))
        return {"num_requests": len(requests), "num_tokens": sum(map(len, expected[0].tokens))}

    if record.measure("reference", reference) is None or not expected:
        return
    for name, config, settings in variants(architecture, quick=record.quick):
        drafting = partial(_served, record, architecture, requests, speculative_config=config, **settings)
        record.measure(name, partial(_equal, expected[0], drafting))


def repetitive(requests: list[Request]) -> list[Request]:
    """Returns requests whose prompts repeat themselves four times, so that lookup finds drafts."""
    return [request._replace(prompt=request.prompt * 4) for request in requests]


def variants(
    architecture: Architecture, *, quick: bool
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yields names, speculative_configs and other settings; the first four alone in a dry run."""
    small = replace(architecture, num_layers=1)
    lookup = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    tree = {"speculative_token_tree": TREE}
    yield "ngram/k4", lookup | {"num_speculative_tokens": 4}, {}
    yield "draft_model_of_itself/k4", _draft("draft_model", architecture, 4), {}
    yield "medusa/tree", {"method": "medusa", "model": architecture, **tree}, {}
    yield "eagle/k3", _draft("eagle", small, 3), {}
    if quick:
        return
    for num_drafts in CHAINS:
        yield (
            f"ngram/k{num_drafts}/eager",
            lookup | {"num_speculative_tokens": num_drafts},
            {"overlap": False},
        )
        yield f"draft_model/k{num_drafts}", _draft("draft_model", small, num_drafts), {}
    for num_drafts in (1, 8):
        yield f"draft_model_of_itself/k{num_drafts}", _draft("draft_model", architecture, num_drafts), {}
    itself = _draft("draft_model", architecture, 4)
    yield "draft_model_of_itself/not_overlapped", itself, {"overlap": False}
    yield "draft_model_of_itself/without_graphs", itself, {"cudagraph_mode": "NONE"}
    yield "draft_model_of_itself/adaptive", itself | {"draft_length": Adaptive()}, {}
    by_size = ByBatchSize(num_speculative_tokens_per_batch_size=((1, 8, 4), (9, 16, 2), (17, 32, 0)))
    yield "draft_model_of_itself/by_batch_size", itself | {"draft_length": by_size}, {}
    yield "draft_model_of_itself/four_iterations", itself, {"max_iterations": 4}
    yield "draft_model_of_itself/few_blocks", itself, {"num_kv_blocks": 40}  # requests are preempted
    self_drafting = {"method": "self_speculative", "num_speculative_tokens": 4, "skipped_layers": [1]}
    yield "self_speculative/k4", self_drafting, {}
    yield "specinfer_tree", {"method": "specinfer_tree", "model": architecture, "widths": [2, 2, 1]}, {}
    yield "lookahead", {"method": "lookahead", "window": 4, "ngram": 3, "guesses": 4}, {}
    yield "eagle3/k3", _draft("eagle3", small, 3), {}
    yield "mtp/k2", _draft("mtp", architecture, 2), {}
    yield "medusa/k3", _draft("medusa", architecture, 3), {}
    yield "eagle/tree", {"method": "eagle", "model": small, **tree}, {}


def _draft(method: str, model: Architecture, num_drafts: int) -> dict[str, Any]:
    return {"method": method, "model": model, "num_speculative_tokens": num_drafts}


def _served(record: Record, architecture: Architecture, requests: list[Request], **settings: Any) -> Served:
    with served(architecture, record.device, **{**COMMON, **settings}) as llm:
        outputs = llm.generate([r.prompt for r in requests], [params_of(r) for r in requests])
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        raise RuntimeError(f"a request ended with an error: {failed}")
    counts = [output.drafts for output in outputs if output.drafts is not None]
    return Served(
        [output.outputs[0].token_ids for output in outputs],
        sum(each.num_draft_tokens for each in counts),
        sum(each.num_accepted_tokens for each in counts),
    )


def _equal(expected: Served, drafting: Any) -> dict[str, Any]:
    found = drafting()
    row = agreement(expected.tokens, found.tokens)
    counts = {"num_draft_tokens": found.num_drafts, "num_accepted_tokens": found.num_accepted}
    said = f"{row['same_share']:.0%} of requests equal, {found.num_accepted} of {found.num_drafts} accepted"
    return row | counts | {"said": said}
