"""Runs what people brought once and got a wrong answer to: `make cases`, `python -m tests.cases [NAME ...]`.

Each folder of ../shared/cases holds an input, where it is from, and what is right. The table below has the
commands that answer it, and a check of each answer. A line says whether the answer is right, wrong or
refused, and the value that decides. Exit code 1: an answer is wrong, or refused where there should be one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT.parent / "shared" / "cases"
LIMIT_S = 600.0
"""A command that takes longer is wrong: it hangs."""


class Wrong(Exception):
    """An answer that is not right; the message is the value that decides."""


@dataclass(frozen=True)
class Answer:
    """The output of a command, and the summary of its run."""

    code: int
    text: str
    summary: dict[str, Any]
    wall_s: float

    @property
    def refusal(self) -> str:
        """The sentence of a command that was refused; empty if it was not."""
        if self.code != 2:
            return ""
        said = [line for line in self.text.splitlines() if line.startswith("windtunnel: ")]
        return said[-1] if said else self.text.strip()[-200:]


Check = Callable[[list[Answer]], str]


@dataclass(frozen=True)
class Case:
    """Commands (words of `windtunnel`), which run in a copy of the case's folder, and their check.

    check: returns the value that decides; raises Wrong. planned: why the answer is known to be wrong.
    """

    commands: tuple[str, ...]
    check: Check
    planned: str = ""
    makes: dict[str, str] = field(default_factory=dict)
    """Files that the folder does not have, and their contents."""


# Checks


def right(condition: bool, shown: str) -> str:
    """Returns the value that decides. Raises Wrong unless the condition holds."""
    if not condition:
        raise Wrong(shown)
    return shown


def near(found: float, expected: float, share: float, name: str) -> str:
    """Returns a value beside the expected one. Raises Wrong unless it is as near as that share."""
    shown = f"{name} {found:,.4g}, expected {expected:,.4g} within {share:.0%}"
    return right(abs(found - expected) <= share * abs(expected), shown)


def answered(answer: Answer) -> Answer:
    """Returns an answer. Raises Wrong with the refusal if there is none."""
    if answer.code not in (0, 3):
        raise Wrong(answer.refusal or f"exit code {answer.code}: {answer.text.strip()[-200:]}")
    return answer


def number(answer: Answer, pattern: str) -> float:
    """Returns the number in the first match of a pattern. Raises Wrong if there is none."""
    found = re.search(pattern, " ".join(answered(answer).text.split()))
    if found is None:
        raise Wrong(f"nothing like {pattern!r} is printed")
    return float(found[1].replace(",", ""))


def mean_ms(answer: Answer, name: str) -> float:
    """Returns the mean of a latency in ms."""
    return 1e3 * float(answered(answer).summary[name]["mean_s"])


def says(answer: Answer, *texts: str) -> str:
    """Returns the texts, which the output must have, whatever its line breaks. Raises Wrong."""
    plain = " ".join(answered(answer).text.split())
    missing = [text for text in texts if text not in plain]
    return right(not missing, f"says {texts[0]!r}" if not missing else f"does not say {missing[0]!r}")


def refuses(answer: Answer, *texts: str) -> str:
    """Returns a refusal in which all texts are. Raises Wrong."""
    said = answer.refusal
    missing = [text for text in texts if text not in said]
    return right(bool(said) and not missing, f"exit {answer.code}: {said or answer.text.strip()[-150:]}")


def bad_values(answers: list[Answer]) -> str:
    answered(answers[0])
    refuses(answers[1], "start_nan.json", "start_times[0]", "nan")
    return refuses(answers[2], "ttft_nan.json", "ttfts[0]", "nan")


def requests(answer: Answer, expected: int) -> str:
    found = answered(answer).summary["requests"]["finished"]
    return right(found == expected, f"{found} of {expected} requests finished")


def late(answers: list[Answer]) -> str:
    says(answers[0], "86,400 s", "workload.start_s=0")
    near(
        answers[1].summary["cost"]["usd_per_1000_requests"], 0.649, 0.1, "$ per 1,000 requests of burst2.csv"
    )
    return near(answers[0].summary["cost"]["usd_per_1000_requests"], 0.721, 0.1, "$ per 1,000 requests")


def block16(answers: list[Answer]) -> str:
    requests(answers[1], 2)
    return refuses(answers[0], "workload.tokens_per_hash=16")


def decimals(answers: list[Answer]) -> str:
    requests(answers[0], 1)
    requests(answers[1], 2)
    return refuses(answers[2], "half.csv:2:3", "5.5")


def texts(answers: list[Answer]) -> str:
    says(answers[0], "4 characters per token")
    return requests(answers[0], 2)


def blis(answers: list[Answer]) -> str:
    right(
        answered(answers[0]).summary["simulated_s"] < 10,
        f"{answers[0].summary['simulated_s']:.3g} s simulated",
    )
    return requests(answers[0], 2)


def memory_of(answer: Answer) -> tuple[float, float]:
    """Returns the weights in GiB and the KV in KiB per token that roofline prints."""
    return number(answer, r"([\d.,]+) GiB weights"), number(answer, r"([\d.,]+) KiB of KV per token")


def quantised(answers: list[Answer]) -> str:
    weights, kv = memory_of(answers[0])
    near(kv, 72, 0.02, "KiB of KV per token")
    return near(weights, 6.0, 0.1, "GiB of weights")


def modelopt(answers: list[Answer]) -> str:
    return near(memory_of(answers[0])[0], 8.4, 0.15, "GiB of weights")


def kv_tokens(answer: Answer) -> float:
    return number(answer, r"([\d,]+) blocks of \d+") * number(answer, r"[\d,]+ blocks of (\d+)")


def kv_235b(answers: list[Answer]) -> str:
    near(kv_tokens(answers[1]), 367_404, 0.12, "SGLang's KV tokens")
    return near(kv_tokens(answers[0]), 178_880, 0.12, "vLLM's KV tokens")


def no_kv_room(answers: list[Answer]) -> str:
    text = answered(answers[0]).text
    winner = text.strip().splitlines()[0]
    right("--max-model-len" in text, "the printed command line has no --max-model-len")
    return right(not re.match(r"1 x h100_sxm.*\(1 GPU\)", winner), f"winner: {winner[:80]}")


def headroom(answers: list[Answer]) -> str:
    plain = " ".join(answered(answers[0]).text.split())
    found = re.search(r"SLO is met up to ([\d.,]+) times", plain)
    if found is None or "too short" in plain:
        return "no headroom is claimed for traffic that is too short"
    return near(float(found[1].replace(",", "")), 35, 0.25, "times the traffic")


def infeasible(answers: list[Answer]) -> str:
    text = " ".join(answers[0].text.split())
    right(answers[0].code in (0, 3), f"exit code {answers[0].code}")
    return right("TTFT" in text and "idle" in text, "TTFT is missed on an idle replica")


def hardware(answers: list[Answer]) -> str:
    wanted = (
        "h20",
        "h800",
        "a800",
        "h100_nvl",
        "gh200",
        "l20",
        "rtx_a6000",
        "rtx_6000_ada",
        "gb10",
        "mi308x",
    )
    known = answered(answers[0]).text.split()
    missing = [name for name in wanted if not any(f"{one}_".startswith(f"{name}_") for one in known)]
    if not any("910" in one for one in known):
        missing.append("ascend 910B")
    return right(not missing, f"missing: {', '.join(missing)}" if missing else "all devices are there")


def preempted(answers: list[Answer]) -> str:
    found = answered(answers[0]).summary
    share, number = found["cache"]["hit_share"], found["preemptions"]
    return right(share == 0.0 and number > 0, f"{share:.1%} found with {number} preemptions")


def reserved(answers: list[Answer]) -> str:
    found = answered(answers[0]).summary
    most = found["iterations"]["max_batch_seqs"]
    return right(
        found["preemptions"] == 0 and most <= 2,
        f"{found['preemptions']} preempted, at most {most} in a batch",
    )


def patience(answers: list[Answer]) -> str:
    without, with_it = (answered(one).summary["throughput"]["output_tokens_per_s"] for one in answers)
    return right(with_it <= 1.01 * without, f"{with_it:,.0f} tokens/s with timeouts, {without:,.0f} without")


def one_user(answers: list[Answer]) -> str:
    return near(mean_ms(answers[0], "tpot"), 10.5, 0.08, "TPOT ms")


def pool_of_sessions(answers: list[Answer]) -> str:
    most = answered(answers[0]).summary["iterations"]["max_batch_seqs"]
    return right(most <= 9, f"at most {most} requests in a batch of 9 sessions")


def all_found(answers: list[Answer]) -> str:
    found = answered(answers[0]).summary["cache"]["found_tokens"]
    return right(found >= 4095 // 16 * 16, f"{found} of 4,096 tokens of the second prompt found")


def slo_scaler(answers: list[Answer]) -> str:
    ttft = mean_ms(answers[0], "ttft")
    return right(ttft < 5000, f"TTFT mean {ttft:,.0f} ms")


def bursts(answers: list[Answer]) -> str:
    return says(answers[0], "burst")


def sweep(answers: list[Answer]) -> str:
    text = answered(answers[0]).text
    return right("per GPU" in text or "per_gpu" in text, "the table has output tokens/s per GPU and per user")


def lora(answers: list[Answer]) -> str:
    without, with_it = (answered(one).summary["throughput"]["requests_per_s"] for one in answers)
    return near(with_it / without - 1, -0.34, 0.3, "change of requests/s")


def ranks(answers: list[Answer]) -> str:
    """Returns TTFTs of eight ranks that compute a prompt each: 2.1 s, more if it fills the budget of a rank.

    A rank that decodes d sequences then computes 8,192 - d of its tokens, and the last d an iteration later,
    as vLLM's scheduler of that rank does. In a closed loop the ranks are ahead of tensor parallelism.
    """
    as_long, shorter = (mean_ms(answer, "ttft") for answer in answers[:2])
    of_ranks, of_tensor = (answered(one).summary["throughput"]["requests_per_s"] for one in answers[2:])
    return right(
        as_long < 4000 and shorter < 2500 and of_ranks > 1.2 * of_tensor,
        f"TTFT mean {as_long:,.0f} ms, {shorter:,.0f} of prompts of 8,000 tokens; {of_ranks:.2f} requests/s, "
        f"{of_tensor:.2f} with TP8",
    )


def eplb(answers: list[Answer]) -> str:
    plain, rearranged = (answered(one).summary["throughput"]["output_tokens_per_s"] for one in answers)
    return right(rearranged > plain, f"{rearranged / plain - 1:+.0%} output tokens/s by EPLB")


def towers(answers: list[Answer]) -> str:
    return right(memory_of(answers[0])[0] > 3.7, f"{memory_of(answers[0])[0]} GiB of weights")


def noop(answers: list[Answer]) -> str:
    return right(memory_of(answers[0])[0] > 1, f"{memory_of(answers[0])[0]} GiB of weights")


# The endpoint


def served(posts: tuple[tuple[str, dict[str, Any]], ...], folder: Path) -> list[tuple[int, str]]:
    """Returns status and body of requests to `windtunnel serve`."""
    words = [*WINDTUNNEL, "serve", "port=0", "--served-model-name", "m"]
    with subprocess.Popen(
        words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = next(
                (found[0] for line in server.stdout if (found := re.search(r"http://[\d.:]+", line))), ""
            )
            return [_posted(f"{url}{path}", body) for path, body in posts]
        finally:
            server.send_signal(signal.SIGTERM)  # Ctrl-C is ignored by a background job's processes
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


def _posted(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read(300).decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read(300).decode()


def context_length(folder: Path) -> str:
    body = {"prompt": "word " * 200_000, "stream": True, "max_tokens": 5}
    ((status, text),) = served((("/v1/completions", body),), folder)
    return right(status == 400, f"status {status}: {text[:80]}")


def routes(folder: Path) -> str:
    message = [{"role": "user", "content": "hello"}]
    posts: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/responses", {"input": "hello", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": message, "max_tokens": 4, "model": "m"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 4}}),
    )
    found = {path: status for (path, _), (status, _) in zip(posts, served(posts, folder), strict=True)}
    return right({*found.values()} == {200}, ", ".join(f"{path} {status}" for path, status in found.items()))


ENDPOINT = {"endpoint_context_length": context_length, "endpoint_routes": routes}

# The table

QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
"""The fields of Qwen/Qwen3-VL-2B-Instruct on which its size depends."""
HALF = {"half.csv": "arrival_s,prompt_tokens,output_tokens\n0,5.5,5\n"}
CAPACITY = (
    "capacity capacity.hardware=[h100_sxm] workload=poisson capacity.seeds=[0] capacity.jobs=1 "
    "capacity.window_s=null "
)
CLOSED = "simulate workload=closed_loop workload.num_requests=2000 workload.arrivals.num_users=1024"
LORA_TRAFFIC = (
    "{0}=fixed {1}lengths.prompt_tokens.value=246 {1}lengths.output_tokens.value=235 "
    "model=llama2_7b hardware=a100_80gb_sxm engine=vllm_v0"
)
DEEPSEEK = (
    "simulate model=deepseek_r1 hardware=h200_sxm attention_data_parallel_size=8 expert_parallel_size=8 "
    "workload=poisson workload.arrivals.rate_per_s=2 workload.num_requests=100 "
    "workload.lengths.prompt_tokens.value=8192 workload.lengths.output_tokens.value=64"
)
USERS = (
    "simulate model=deepseek_r1 hardware=h200_sxm workload=closed_loop workload/arrivals=max_concurrency "
    "workload.arrivals.num_users=128 workload.num_requests=400 workload/lengths=fixed "
    "workload.lengths.prompt_tokens.value=8192 workload.lengths.output_tokens.value=1 "
)
CASES: dict[str, Case] = {
    "bench_json_bad_values": Case(
        tuple(f"validate against={name}.json thresholds=none" for name in ("bench", "start_nan", "ttft_nan")),
        bad_values,
    ),
    "blis_tracev2": Case(("simulate workload=blis_tracev2 workload.path=blis.csv",), blis),
    "capacity_no_kv_room": Case(
        (
            CAPACITY + "model=llama3_1_70b capacity.tensor_parallel_sizes=[1,2,4] "
            "workload.arrivals.rate_per_s=0.05 workload.num_requests=60 slo.ttft_ms=3000 slo.tpot_ms=60",
        ),
        no_kv_room,
    ),
    "config_modelopt_without_method": Case(
        ("roofline model=hf model.path=. batch_sizes=[1] out=null",), modelopt
    ),
    "config_noop_field_qk_norm": Case(("roofline model=hf model.path=. batch_sizes=[1] out=null",), noop),
    "decimal_tokens": Case(
        (
            "simulate workload=plain_csv workload.path=f.csv",
            "simulate workload=azure_csv workload.path=bom.csv",
            "simulate workload=plain_csv workload.path=half.csv",
        ),
        decimals,
        makes=HALF,
    ),
    "dp_attention_budget_of_replica": Case(
        (
            DEEPSEEK,
            DEEPSEEK.replace("8192", "8000"),
            USERS + "attention_data_parallel_size=8 expert_parallel_size=8",
            USERS + "tensor_parallel_size=8",
        ),
        ranks,
    ),
    "eplb_redundant": Case(
        tuple(
            "simulate model=qwen3_30b_a3b hardware=h100_sxm tensor_parallel_size=8 expert_parallel_size=8 "
            f"workload.num_requests=300 workload=offline_batch engine.kernels.routing.placement={placement}"
            for placement in ("in_order", "eplb")
        ),
        eplb,
    ),
    "hardware_missing": Case(("list hardware",), hardware),
    "headroom_of_short_window": Case(
        (
            CAPACITY + "capacity.tensor_parallel_sizes=[1] capacity.quantisations=[null] "
            "workload.arrivals.rate_per_s=1 workload.num_requests=100",
        ),
        headroom,
    ),
    "infeasible_ttft": Case(
        (
            CAPACITY + "capacity.tensor_parallel_sizes=[1] capacity.quantisations=[null] "
            "workload.arrivals.rate_per_s=0.1 workload.num_requests=40 workload/lengths=fixed "
            "workload.lengths.prompt_tokens.value=30000 workload.lengths.output_tokens.value=64 "
            "slo.ttft_ms=500",
        ),
        infeasible,
    ),
    "kv_qwen3_235b_vllm_sglang": Case(
        tuple(
            "roofline model=qwen3_235b_a22b model.weights=fp8_block hardware=h100_sxm tensor_parallel_size=4 "
            f"engine.max_model_len=40960 batch_sizes=[1] out=null {words}"
            for words in (
                "engine.version=0.9.2 engine.gpu_memory_utilization=0.9",  # those of that day
                "engine=sglang engine.gpu_memory_utilization=0.93",
            )
        ),
        kv_235b,
        planned="1.9 GiB of the 8.0 that this vLLM took beside weights and KV are not explained; it ran "
        "LMCache, for which uneven memory of GPUs is reported (LMCache issue 714) without a figure",
    ),
    "lora_overhead": Case(
        (
            "simulate workload=offline_batch " + LORA_TRAFFIC.format("workload/lengths", "workload."),
            "simulate workload=lora workload@workload.of=offline_batch workload.num=1 workload.ranks=[8] "
            "adapters=fixed_slots "
            + LORA_TRAFFIC.format("workload/lengths@workload.of.lengths", "workload.of."),
        ),
        lora,
    ),
    "mooncake_block16": Case(
        tuple(
            f"simulate workload=mooncake_jsonl workload.path=moon_b16.jsonl {words}"
            for words in ("", "workload.tokens_per_hash=16")
        ),
        block16,
    ),
    "mooncake_without_hashes": Case(
        ("simulate workload=mooncake_jsonl workload.path=moon_nohash.jsonl",), lambda a: requests(a[0], 2)
    ),
    "otel_trace": Case(
        ("simulate workload=otel_trace workload.path=otel.json",), lambda a: requests(a[0], 2)
    ),
    "patience_throughput": Case((CLOSED, f"{CLOSED} workload.patience_s=60"), patience),
    "preempted_prefix_hits": Case(
        (
            "simulate workload=poisson workload.num_requests=50 model=llama3_1_70b model.weights=fp8 "
            # 16000 is refused, as vLLM would
            "hardware=h100_sxm engine.gpu_memory_utilization=0.95 engine.max_model_len=12000",
        ),
        preempted,
    ),
    "quant_in_hf_quant_config": Case(
        ("roofline model=hf model.path=. hardware=b200_sxm batch_sizes=[1] out=null",), quantised
    ),
    "reserve_full_isl": Case(
        ("simulate workload=plain_csv workload.path=isl.csv engine.num_kv_blocks=5000",), reserved
    ),
    "rtx4090_single_user": Case(
        (
            "simulate model=qwen3_4b hardware=rtx_4090 workload=closed_loop workload.num_requests=20 "
            "workload.arrivals.num_users=1 workload/lengths=fixed workload.lengths.prompt_tokens.value=128 "
            "workload.lengths.output_tokens.value=128",
        ),
        one_user,
    ),
    "sessions_in_closed_loop": Case(
        ("simulate workload=conversation workload/arrivals=closed_loop workload.num_conversations=9",),
        pool_of_sessions,
    ),
    "sglang_prefix_chunks": Case(
        ("simulate workload=mooncake_jsonl workload.path=same_4096.jsonl hardware=h200_sxm engine=sglang",),
        all_found,
    ),
    "sharegpt_json": Case(("simulate workload=sharegpt_json workload.path=sharegpt.json",), texts),
    "slo_scaler_disaggregated": Case(
        (
            "simulate model=qwen3_30b_a3b hardware=h100_sxm pools=disaggregated network=infiniband "
            "workload=poisson workload.arrivals.rate_per_s=8 workload.lengths.prompt_tokens.value=8000 "
            "workload.lengths.output_tokens.value=20 workload.num_requests=2400 slo.ttft_ms=1000 "
            "slo.tpot_ms=100 cold_start=in_memory scaling=slo_attainment",
        ),
        slo_scaler,
    ),
    "spec_itl_tpot": Case(
        (
            "simulate speculation=eagle3 workload=closed_loop workload.arrivals.num_users=1 "
            "workload.num_requests=10",
        ),
        bursts,
    ),
    "sweep_pareto": Case(
        (
            "sweep workload=closed_loop workload.num_requests=60 workload.arrivals.num_users=1,16 "
            "workload.arrivals.think_time_s.mean=1e-6 tensor_parallel_size=1,2",
        ),
        sweep,
    ),
    "trace_starts_late": Case(
        (
            "simulate workload=plain_csv workload.path=late.csv",
            "simulate workload=burstgpt_csv workload.path=burst2.csv",
        ),
        late,
    ),
    "kv_qwen35_hybrid_h20": Case(
        (
            "roofline hardware=h20 engine.version=0.19.0 model=qwen3_5_35b_a3b engine.max_model_len=32768 "
            "engine.max_num_seqs=16 engine.max_num_batched_tokens=16384 batch_sizes=[1] out=null",
        ),
        lambda answers: near(kv_tokens(answers[0]), 1_082_655, 0.12, "KV tokens"),
    ),
    "vl_tower_memory": Case(
        ("roofline model=hf model.path=config.json hardware=rtx_4090 batch_sizes=[1] out=null",),
        towers,
        makes={"config.json": json.dumps(QWEN3_VL_2B)},
    ),
}

# Running

WINDTUNNEL = (sys.executable, "-m", "experiments.app.cli")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    "COLUMNS": "200",
    "NO_COLOR": "1",
}


def answer_of(words: str, folder: Path) -> Answer:
    """Runs a command in a folder."""
    begun = time.monotonic()
    command = [*WINDTUNNEL, *words.split()]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, f"ran for more than {LIMIT_S:g} s", {}, LIMIT_S)
    written = sorted(folder.glob("outputs/*/*/*/summary.json"), key=lambda file: file.stat().st_mtime_ns)
    is_new = written and written[-1].stat().st_mtime > time.time() - (time.monotonic() - begun) - 1
    summary = json.loads(written[-1].read_text()) if is_new else {}
    return Answer(done.returncode, done.stdout, summary, time.monotonic() - begun)


def verdict(name: str) -> tuple[str, str]:
    """Returns right, wrong, refused, known or skipped, and the value that decides."""
    if not (FOLDER / name).is_dir():
        return "skipped", f"{FOLDER / name} is not there"
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name)
        shutil.copytree(FOLDER / name, folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        case = CASES.get(name)
        if case is None:
            check = ENDPOINT.get(name)
            if check is None:
                return "skipped", "tests/cases.py has no check of it"
            return judged(lambda: check(folder))
        for file, content in case.makes.items():
            (folder / file).write_text(content)
        answers = [answer_of(words, folder) for words in case.commands]
        found, shown = judged(lambda: case.check(answers))
        if found == "wrong" and any(one.refusal for one in answers):
            found = "refused"
        if case.planned and found != "right":
            return "known", f"{shown} ({case.planned})"
        return found, shown


def judged(check: Callable[[], str]) -> tuple[str, str]:
    """Returns right or wrong, and the value that decides."""
    try:
        return "right", check()
    except Wrong as error:
        return "wrong", str(error)
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        return "wrong", f"the answer cannot be checked: {type(error).__name__}: {error}"


def names() -> list[str]:
    """Returns the names of the cases: those of the table, and those that the folder has beyond it."""
    found = {path.name for path in FOLDER.iterdir() if path.is_dir()} if FOLDER.is_dir() else set()
    return sorted({*CASES, *ENDPOINT, *found})


def main(wanted: list[str]) -> int:
    """Prints a line per case; returns the exit code."""
    if not FOLDER.is_dir():
        print(f"skipped: there is no folder {FOLDER}")
        return 0
    unknown = [name for name in wanted if name not in names()]
    if unknown:
        print(f"{unknown[0]}: no such case; all: {', '.join(names())}")
        return 2
    counts: dict[str, int] = {}
    for name in wanted or names():
        found, shown = verdict(name)
        counts[found] = counts.get(found, 0) + 1
        print(f"{found:8} {name:32} {' '.join(shown.split())[:200]}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in sorted(counts.items())))
    return int(any(counts.get(found) for found in ("wrong", "refused")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
