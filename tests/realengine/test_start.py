"""The start of an engine compiles every kernel that requests launch later, and draws bars of its progress."""

import io
import random
import re
import sys
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="the engine needs torch")
pytest.importorskip("triton", reason="kernels are Triton's")

import torch
from triton.runtime.interpreter import InterpretedFunction

from kernels.launch import compiling_for
from kernels.norm import rms_norm_kernel
from policies.batching.chunked import Chunked
from policies.scheduling.fcfs import Fcfs
from realengine.ahead.setups import DRAFTERS, MODELS
from realengine.ahead.startup import run_works
from realengine.ahead.zeros import EngineShape, WithoutProducts
from realengine.model.architecture import Architecture
from realengine.progress import WIDTH, Progress
from realengine.serving.llm import LLM
from realengine.serving.sampling_params import SamplingParams
from realengine.settings import KV_DTYPES
from realengine.speculation.settings import NEEDS_MODEL, PROPOSERS
from tests.realengine.adapters import random_adapter
from tests.realengine.recorded import record_on_cpu
from tests.realengine.small_models import CONFIGS

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not isinstance(rms_norm_kernel, InterpretedFunction),
    reason="kernels are not interpreted",
)
TINY = Architecture.from_hf(CONFIGS["llama"])
LENGTH, BUDGET, SLOTS = 6000, 2048, 12
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = (
    GREEDY,
    replace(GREEDY, temperature=0.8, top_p=0.9),
    replace(GREEDY, temperature=0.8, presence_penalty=0.5),
    replace(GREEDY, logprobs=3),
    replace(GREEDY, temperature=1.0, n=3),
    replace(GREEDY, min_tokens=3, stop_token_ids=(5, 6)),
)
SMALL = Architecture.from_hf(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8000,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "intermediate_size": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
)


def specialised(arg, *, is_general, has_any_alignment):
    """Returns what of an argument Triton compiles a kernel for."""
    if isinstance(arg, torch.Tensor):
        return str(arg.dtype), has_any_alignment or arg.data_ptr() % 16 == 0
    if isinstance(arg, bool) or not isinstance(arg, int):
        return None if arg is None else type(arg)
    if is_general:
        return int
    if arg == 1:
        return 1
    return abs(arg) >= 1 << 31, not has_any_alignment and arg % 16 == 0


class Launches:
    """The kernels that were launched, as Triton tells them apart; nothing is run."""

    def __init__(self):
        self.found = Counter()

    def __call__(self, kernel, grid, args, meta):
        if 0 in grid:
            return
        general, aligned = (
            kernel.kwargs.get(key) or () for key in ("do_not_specialize", "do_not_specialize_on_alignment")
        )
        own = tuple(
            specialised(arg, is_general=name in general, has_any_alignment=name in aligned)
            for name, arg in zip(kernel.arg_names, args, strict=False)  # constexprs follow
        )
        self.found[kernel.__name__, own, tuple(sorted(meta.items()))] += 1


def shape_of(architecture, settings):
    dtype = torch.bfloat16
    return EngineShape(
        architecture=architecture,
        dtype=dtype,
        kv_dtype=KV_DTYPES.get(settings.get("kv_cache_dtype"), dtype),
        quantization=settings.get("quantization"),
        world_size=1,
        block_size=16,
        max_model_len=LENGTH,
        max_num_seqs=SLOTS,
        max_num_tokens=BUDGET,
        max_loras=settings.get("max_loras", 0),
        max_rank=8 if "max_loras" in settings else 0,
    )


def serve_all_kinds(llm, names):
    generator = random.Random(1)
    for num in (1, 3, 9, 20):
        lengths = [generator.choice([1, 2, 15, 17, 60, 130, 300, 700, 2500, 5000]) for _ in range(num)]
        texts = [[generator.randrange(7000) for _ in range(length)] for length in lengths]
        llm.generate(
            texts, [generator.choice(KINDS) for _ in texts], [generator.choice(names) for _ in texts]
        )


@pytest.mark.sampled(slow=4)
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("small", {}),
        ("small", {"max_loras": 2}),
        *(
            pytest.param("small", settings, marks=pytest.mark.slow)
            for settings in (
                {"cudagraph_mode": "PIECEWISE"},
                {"cudagraph_mode": "FULL_DECODE_ONLY", "overlap": True},
                {"kv_cache_dtype": "int8"},
                {"kv_cache_dtype": "int4"},
                {"quantization": "w4a16"},
                {"quantization": "fp8"},
                {"num_kv_blocks": 700, "scheduling": Fcfs(preemption_mode="swap")},
            )
        ),
        *(
            pytest.param(name, {}, marks=pytest.mark.slow)
            for name in ("mistral-7b", "qwen3-0.6b", "llama-3.2-1b", "smollm2-135m")
        ),
    ],
    ids=str,
)
def test_no_request_compiles_a_kernel(monkeypatch, model, settings):
    record_on_cpu(monkeypatch)
    architecture = SMALL if model == "small" else replace(MODELS[model], num_layers=2)
    adapters = {}
    if "max_loras" in settings:
        adapters = {name: random_adapter(architecture, 8, seed=seed) for seed, name in enumerate("abc")}
    ahead, start, service = launched(architecture, {"lora_adapters": adapters} | settings)
    assert len(service) > 10
    assert start <= ahead
    assert service <= ahead


@pytest.mark.sampled(slow=3)
@pytest.mark.parametrize(
    "drafter",
    [
        "ngram",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("draft_model", "drawn_drafts", "self_speculative", "lookahead", "medusa", "eagle")
        ),
    ],
)
def test_no_pass_with_drafts_compiles_a_kernel(monkeypatch, drafter):
    record_on_cpu(monkeypatch)
    config = dict(DRAFTERS[drafter])
    if issubclass(PROPOSERS[config["method"]], NEEDS_MODEL):
        config["model"] = SMALL
    ahead, start, service = launched(SMALL, {"speculative_config": config})
    assert any(name == "match_kernel" for name, *_ in service)
    assert service <= ahead | start


def launched(architecture, settings):
    """Returns what is compiled ahead, what a start launches and what requests launch then."""
    ahead, start, service = Launches(), Launches(), Launches()
    with compiling_for("sm_90", ahead):
        run_works(shape_of(architecture, settings))
    launches = start
    defaults = {"cudagraph_mode": "FULL_AND_PIECEWISE", "num_kv_blocks": 4000}
    with (
        compiling_for("sm_90", lambda *launch: launches(*launch)),
        WithoutProducts(),
    ):
        llm = LLM(
            architecture,
            device="cpu",
            backend="triton",
            dtype="bfloat16",
            max_model_len=min(LENGTH, architecture.max_position_embeddings),
            max_num_seqs=SLOTS,
            batching=Chunked(max_num_batched_tokens=BUDGET),
            **(defaults | settings),
        )
        launches = service
        serve_all_kinds(llm, [None, *settings.get("lora_adapters", ())])
    return set(ahead.found), set(start.found), set(service.found)


def test_bars_show_each_part_of_a_start(monkeypatch):
    record_on_cpu(monkeypatch)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shown = {"device": "cpu", "num_kv_blocks": 20, "max_num_seqs": 2, "progress": True}
    LLM(TINY, cudagraph_mode="FULL_AND_PIECEWISE", **shown)
    bars = sys.stderr.getvalue()
    for what in ("Loading weights", "Capturing decode steps", "Capturing pieces of steps"):
        assert re.search(rf"{what} +#{{{WIDTH}}} (\d+)/\1 ", bars)  # it is full at the end


def test_without_a_terminal_nothing_is_drawn(monkeypatch, capsys):
    LLM(TINY, device="cpu", num_kv_blocks=20, max_num_seqs=2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("num", [0, 1, 7])
def test_a_bar_yields_its_items(num):
    for shown in (False, None):
        assert list(Progress(shown).over(list(range(num)), "Counting")) == list(range(num))
