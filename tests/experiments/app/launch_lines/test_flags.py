"""The tables of flags, and how the values of flags are read."""

import pytest

from experiments.app.launch_lines.flags import ENGINES, parse, reasons, table, variables
from sim.settings.errors import ConfigError

KINDS = {"text", "int", "float", "count", "bool", "switch", "list", "optional", "json"}
VLLM = "tensor-parallel-size pipeline-parallel-size data-parallel-size enable-expert-parallel max-num-seqs"
NUMBERS = {"vllm": 316, "sglang": 531, "tensorrt_llm": 40}
"""Flags that the pinned versions have, at least."""


@pytest.mark.parametrize("engine", ENGINES)
def test_every_flag_has_a_kind_and_an_effect_and_every_effect_a_reason(engine):
    rows = table(engine)
    assert len(rows) >= NUMBERS[engine]
    for row in rows.values():
        assert row.flag.startswith("--"), row
        assert row.kind in KINDS, row
        assert row.effect in ("setting", "none", "refused"), row
        assert row.detail or row.effect == "setting", row
    names = [name for row in rows.values() for name in (row.flag, *row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("words", "flag", "value"),
    [
        ("--max-model-len 32k", "--max-model-len", 32_000),
        ("--max-model-len 32K", "--max-model-len", 32_768),
        ("--max-model-len=25.6k", "--max-model-len", 25_600),
        ("--max-model-len auto", "--max-model-len", "auto"),
        ("--max-model-len -1", "--max-model-len", -1),
        ("--max_num_seqs=256", "--max-num-seqs", 256),
        ("-tp 4", "--tensor-parallel-size", 4),
        ("-tp=4", "--tensor-parallel-size", 4),
        ("--tensor-parallel 4", "--tensor-parallel-size", 4),
        ("--no-enable-prefix-caching", "--enable-prefix-caching", False),
        ("--enable-prefix-caching", "--enable-prefix-caching", True),
        ("-O3", "--optimization-level", "3"),
        ("-O 0", "--optimization-level", "0"),
        ("-O=2", "--optimization-level", "2"),
        ("--gpu-memory-utilization .85", "--gpu-memory-utilization", 0.85),
        ("--cudagraph-capture-sizes 1 2 4 --port 1", "--cudagraph-capture-sizes", ["1", "2", "4"]),
        ('--compilation-config {"mode":3}', "--compilation-config", {"mode": 3}),
        ("-cc.cudagraph_mode NONE", "--compilation-config", {"cudagraph_mode": "NONE"}),
        ("-sc.method ngram -sc.num_speculative_tokens=3", "--speculative-config",
         {"method": "ngram", "num_speculative_tokens": 3}),
    ],
)  # fmt: skip
def test_values_are_read_as_vllm_reads_them(words, flag, value):
    assert parse("vllm", words.split()).values[flag] == value


def test_the_last_of_two_values_counts_and_other_words_are_the_model():
    found = parse("vllm", ["some/model", "-tp", "2", "--tensor-parallel-size", "8"])
    assert found.values == {"--tensor-parallel-size": 8}
    assert found.positional == ["some/model"]


@pytest.mark.parametrize(
    ("engine", "words", "message"),
    [
        ("vllm", "--tensor-paralel-size 2", "vLLM 0.33 has no such flag; nearest: --tensor-parallel-size"),
        ("sglang", "--mem-fraction 0.8 --max-num-seqs 4", "SGLang 0.5.23 has no such flag; nearest: --"),
        ("tensorrt_llm", "--max_batchsize 2", "trtllm-serve has no such flag; nearest: --max-batch-size"),
        ("vllm", "-tp two", "-tp two: must be a whole number"),
        ("vllm", "--max-model-len 32q", "must be a whole number, such as 8192 or 32k"),
        ("vllm", "--max-num-seqs", "--max-num-seqs: needs a value"),
        ("vllm", "--max-num-seqs --port 1", "--max-num-seqs: needs a value"),
        ("vllm", "--enforce-eager=3", "takes no value"),
        ("vllm", "--speculative-config {method:", "must be JSON"),
        ("vllm", "-tp $TP", "the variable has no value in the text"),
        ("vllm", "--no-max-num-seqs", "has no such flag"),
    ],
)
def test_a_wrong_flag_is_named_with_what_is_allowed(engine, words, message):
    with pytest.raises(ConfigError, match=r"^--from: ") as error:
        parse(engine, words.split())
    assert message in str(error.value)


def test_flags_without_effect_are_named_and_those_that_would_change_the_result_refused():
    found = parse("vllm", ["--port", "$PORT", "--attention-backend", "FLASHINFER", "--no-enable-dbo"])
    none, refused = reasons(found, {})
    assert list(none) == ["--port", "--attention-backend FLASHINFER", "--no-enable-dbo"]
    assert refused == {}
    for engine, words, reason in (
        ("vllm", "--enable-dbo", "overlapped micro-batches"),
        ("vllm", "--attention-backend FLEX_ATTENTION", "this one is slower"),
        ("sglang", "--disaggregation-mode prefill", "prefill and decode in servers"),
    ):
        none, refused = reasons(parse(engine, words.split()), {})
        assert none == {}
        assert list(refused) == [words]
        assert reason in refused[words]
    none, refused = reasons(parse("sglang", ["--disaggregation-mode", "null"]), {})
    assert (list(none), refused) == (["--disaggregation-mode null"], {})


def test_a_flag_that_applies_with_another_one_has_no_effect_without_it():
    for engine, words, other in (
        ("vllm", "--disable-custom-all-reduce", "--tensor-parallel-size 2"),
        ("sglang", "--enable-mscclpp", "--tp-size 4"),
        ("vllm", "--expert-placement-strategy round_robin", "--enable-expert-parallel"),
    ):
        assert list(reasons(parse(engine, words.split()), {}).without_effect) == [words.split(" ")[0]]
        assert list(reasons(parse(engine, f"{words} {other}".split()), {}).refused) == [words]


def test_variables_have_an_effect_and_a_reason_as_flags_have():
    for row in variables():
        assert row.effect in ("setting", "none", "refused"), row
        assert row.detail, row
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_LAUNCH_BLOCKING": "1", "MODEL": "x", "VLLM_NEW": "1"}
    none, refused = reasons(parse("vllm", []), environment)
    assert set(none) == {"VLLM_LOGGING_LEVEL=DEBUG", "VLLM_NEW=1"}
    assert list(refused) == ["CUDA_LAUNCH_BLOCKING=1"]


def test_json_without_quotation_marks_is_read_as_it_was_meant():
    """A shell removes the marks of --speculative-config={"method":"mtp",...}, which documents print."""
    words = ["--speculative-config={method:mtp,num_speculative_tokens:1,model:a/b-c.d,enforce_eager:true}"]
    assert parse("vllm", words).values["--speculative-config"] == {
        "method": "mtp", "num_speculative_tokens": 1, "model": "a/b-c.d", "enforce_eager": True
    }  # fmt: skip
