"""`windtunnel roofline`: its figures, tables and charts, and refused settings."""

import re
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.report.roofline.chart import roofline, write_chart
from experiments.report.roofline.command import build_survey
from experiments.report.roofline.survey import survey
from experiments.report.roofline.tables import print_survey
from sim.settings.errors import ConfigError

SOURCE = ConfigSource(config_name="roofline", dirs=[CONFIG_DIR])


def found_for(*settings):
    return build_survey(SOURCE.compose(list(settings)))


@pytest.fixture(scope="module")
def found():
    """Returns the tables of Llama 3.1 8B on an H100."""
    return found_for()


def printed(found, width=100):
    console = Console(file=StringIO(), width=width)
    print_survey(found, console)
    return console.file.getvalue()


def lines_of(text):
    return [line.split() for line in text.splitlines()]


def test_points_of_both_phases_at_the_batch_sizes(found):
    sizes = {phase: [p.num_seqs for p in found.points if p.phase == phase] for phase in ("decode", "prefill")}
    # 8,192 tokens in an iteration are 4 prompts of 2,048.
    assert sizes == {"decode": [1, 8, 32, 128, 512], "prefill": [1, 4]}


def test_a_lone_decode_is_bound_by_memory_and_a_prefill_by_compute(found):
    decode, prefill = found.points[0], found.points[-1]
    # Every weight is read for 2 FLOPs: 1 FLOP a byte in bf16.
    assert decode.intensity == pytest.approx(1, rel=0.05)
    assert (decode.bound, prefill.bound) == ("memory", "compute")
    assert decode.mbu > 0.5 > decode.mfu
    assert prefill.mfu > 0.4 > prefill.mbu


def test_the_operators_are_those_of_the_chosen_iteration(found):
    assert (found.explained.phase, found.explained.num_seqs) == ("decode", 32)
    assert sum(line.seconds for line in found.operators) == pytest.approx(found.explained.seconds)
    settings = replace(found.settings, phase="prefill", batch_size=3)
    explained = survey(settings).explained
    assert (explained.phase, explained.num_seqs, explained.num_tokens) == ("prefill", 3, 3 * 2048)


@pytest.mark.parametrize(
    "settings",
    [
        ["speculation=eagle3"],
        ["speculation=lookahead"],
        ["speculation=eagle3", "pipeline_parallel_size=2"],
        ["speculation=medusa", "model=vicuna_7b", "speculation/tree=medusa_64"],
    ],
    ids=" ".join,
)
def test_decodes_with_speculation_are_passes_with_draft_tokens_and_drafting(settings):
    found = found_for(*settings, "batch_sizes=[1,64]")
    for batch, point in zip(found.drafted, found.points, strict=False):
        assert batch.num_seqs == point.num_seqs
        assert batch.pass_s + batch.drafting_s == pytest.approx(point.seconds)
        assert batch.break_even > 1
        assert batch.pass_s >= batch.plain_s
        assert batch.drafting_s > 0
    # More draft tokens cost least where the weights are read for a single sequence.
    assert found.drafted[0].break_even < found.drafted[1].break_even
    # Prompts are followed by drafting, too.
    plain = found_for(*(each for each in settings if "specul" not in each), "batch_sizes=[1,64]")
    assert [batch.plain_s for batch in found.drafted] == [point.seconds for point in plain.points[:2]]
    assert found.points[-1].seconds > plain.points[-1].seconds
    assert plain.drafted == []
    assert "break-even" in printed(found)
    assert "break-even" not in printed(plain)


def test_prints_ridge_points_and_memory(found):
    lines = lines_of(printed(found))
    assert ["bf16", "(model)", "989", "3.35", "295"] in lines
    assert ["fp8", "1,979", "3.35", "591"] in lines
    batch = found.memory.num_blocks // (1024 // 16)
    assert f"Largest batch at 1,024 tokens of context: {batch} sequences (limited by KV blocks;" in printed(
        found
    )


def test_marks_batches_that_do_not_fit(found):
    lines = [line for line in printed(found).splitlines() if line.startswith(" decode")]
    assert [" * " in line for line in lines] == [False, False, False, False, True]
    small = replace(found.settings, batch_sizes=(1, 8))
    assert "*" not in printed(survey(small))


def test_ends_with_what_the_figures_rest_on(found):
    notes = printed(found).splitlines()[-2:]
    assert notes[0].startswith("Iteration times: ")
    assert notes[1].startswith(
        "Prefill of 8, 32, 128, 512 prompts is left out: it exceeds the engine's 8,192 tokens"
    )


def test_a_format_that_the_gpu_does_not_compute_in_is_noted():
    found = found_for("hardware=a100_80gb_sxm", "model.weights=fp8", "batch_sizes=[1]", "out=null")
    assert any("does not compute in fp8" in note for note in found.notes)
    assert found.compute_dtype == "bf16"


def test_figures_fit_a_narrow_terminal(found):
    assert max(map(len, printed(found, 70).splitlines())) <= 70


def test_chart_has_a_roof_a_data_type_and_points_below_their_own(found):
    figure = roofline(found)
    by_name = {trace.name: trace for trace in figure.data}
    roof = by_name["bf16, ridge 295"]
    assert max(roof.y) == pytest.approx(989.4e12)
    assert roof.y[0] == pytest.approx(roof.x[0] * 3.35e12)
    decodes = by_name["decode, by batch size"]
    assert list(decodes.text) == ["1", "8", "32", "128", "512"]
    # A decode reads its weights from memory: it stays below the slope.
    assert all(y < x * 3.35e12 for x, y in zip(decodes.x, decodes.y, strict=True))
    assert len(by_name["operators"].x) == sum(1 for line in found.operators if line.flops)


def test_chart_opens_offline(found, tmp_path):
    write_chart(tmp_path / "chart.html", found)
    page = (tmp_path / "chart.html").read_text(encoding="utf-8")
    assert "<h1>Roofline: llama-3.1-8b on 1 x H100 SXM</h1>" in page
    # What the page loads, as against what plotly's own text mentions.
    assert re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page) == []
    assert "Plotly.newPlot" in page


def test_several_devices_raise_the_roof():
    found = found_for("tensor_parallel_size=2", "batch_sizes=[1]", "out=null")
    roof = {trace.name: trace for trace in roofline(found).data}["bf16, ridge 295"]
    assert max(roof.y) == pytest.approx(2 * 989.4e12)


def test_the_command_prints_and_writes(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["roofline", "batch_sizes=[1,16]", "latency=spec"]) == 0
    text = capsys.readouterr().out
    assert "llama-3.1-8b on 1 x H100 SXM" in text
    assert "data sheet and one set of efficiencies" in text
    assert [file.name for file in tmp_path.iterdir()] == ["roofline.html"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["batch_sizes=[]"], r"batch_sizes=\[\]: must not be empty, for example batch_sizes=\[1,8,32\]"),
        (["batch_sizes=[8,0]"], r"batch_sizes\[1\]=0: must be >= 1 sequence"),
        (["batch_size=0"], "batch_size=0: must be >= 1 sequence"),
        (["context=0"], "context=0: must be 1 to 131072 tokens, the context of llama-3.1-8b"),
        (["prompt=200000"], "prompt=200000: must be 1 to 131072 tokens"),
        (["phase=both"], "phase=both: must be one of decode, prefill"),
        (["out=."], "out=.: is a folder; name a file in it"),
        (["out=nowhere/x.html"], "out=nowhere/x.html: there is no folder .*/nowhere"),
        (["tensor_parallel_size=3"], "tensor_parallel_size=3: "),
        (["model=llama3_1_70b"], "llama-3.1-70b needs .* the smallest size that fits is 2"),
    ],
)
def test_rejects(settings, message):
    with pytest.raises(ConfigError, match=message):
        found_for(*settings)
