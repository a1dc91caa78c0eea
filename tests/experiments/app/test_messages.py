"""Messages about common mistakes on the command line: one sentence each, with what to write."""

import pytest

from experiments.app.cli import main

CASES = [
    ("simulate workload=plain_csv workload.path=.", "workload.path=.: is a folder; name a trace file in it"),
    ("simulate workload=plain_csv workload.path=a.csv.gz", "a.csv.gz: is not gzip data, although its name"),
    ("simulate workload=plain_csv workload.path=late.csv", "set workload.sort=true to sort the rows"),
    ("goodput goodput.arms=[engine=vlm]", "in quotes: \"goodput.arms=['engine=vlm']\""),
    ("goodput goodput.arms=engine=vllm", "in quotes: \"goodput.arms=['engine=vllm']\""),
    ("report run=.", "run=.: contains no run; give the folder that windtunnel simulate printed"),
    ("simulate model=hf", "model.path: must be given, for example model.path=/models/my-llama"),
    ("simulate model=hf model.path=", "model.path: must be given, for example model.path=/models/my-llama"),
    ("calibrate out=x.yaml", "ops: must be given, for example ops=measurements, a folder with gemm.parquet"),
    ("calibrate out=x.yaml ops=", "ops: must be given, for example ops=measurements, a folder with gemm"),
    ("score measured=/nonexistent", "measured=/nonexistent: no such file; give a measured table"),
    ("simulate slo.attainment_target=95%", "slo.attainment_target=95%: must be a number; write 0.95"),
    ("spares wanted_share=99.9", "wanted_share=99.9: must be > 0 and < 1; write 0.999 for 99.9 %"),
    (
        "simulate pools=disaggregated +pools.decode.model.kv_cache_dtype=fp8",
        "pools.decode.model.kv_cache_dtype=fp8: must be bf16 as in pools.prefill, as KV is transferred",
    ),
    (
        "simulate pools=disaggregated batching=static batching.until_last=true",
        "batching.until_last=true: is for the whole run, and pools.prefill.batching=prefill_only has no such",
    ),
]


@pytest.mark.parametrize(("line", "message"), CASES, ids=lambda text: text[:40])
def test_a_common_mistake_is_answered_with_what_to_write(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv.gz").write_text("TIMESTAMP\n")
    (tmp_path / "late.csv").write_text("arrival_s,prompt_tokens,output_tokens\n5,10,5\n1,10,5\n")
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_name_without_its_colon_is_answered_with_the_line_to_write(capsys):
    assert main(["whatif", "whatif.changes=['double load=2']"]) == 2
    assert "a name must end with a colon; write 'double: load=2'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "dialects"])
def test_usage_is_an_error_without_arguments(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: windtunnel {command} ")
