"""Prints the survey of a roofline on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.app.terminal import plain_table
from experiments.report.roofline.survey import Survey
from hwmodels.host import GIB
from hwmodels.iterations import Explained
from hwmodels.iterations.ops import OperatingPoint, ridge_points
from sim.report.numbers import number, percent
from sim.report.wording import plural

MIN_SHARE = 0.002
"""Share of an iteration below which operators are summed in one line."""


def print_survey(found: Survey, console: Console) -> None:
    """Prints the tables of a survey: ridge points, batches, memory and operators."""
    console.print(Text(title(found), style="bold"))
    console.print(_ridges(found))
    console.print(_points(found))
    if not all(_fits(found, point) for point in found.points):
        console.print(Text("* exceeds the largest batch that fits into memory, see below"))
    if found.drafted:
        console.print(_drafts(found))
    for line in memory_lines(found):
        console.print(Text(line))
    console.print()
    console.print(Text(explained_title(found), style="bold"))
    console.print(_operators(found.operators))
    for note in found.notes:
        console.print(Text(note, style="yellow"))


def title(found: Survey) -> str:
    """Returns "MODEL on N x GPU"."""
    settings = found.settings
    return f"{settings.model.name} on {settings.layout.num_devices} x {settings.hardware.name}"


def explained_title(found: Survey) -> str:
    """Returns the title of the table of operators, with the batch and its milliseconds."""
    point = found.explained
    size = f"{point.num_seqs:,} x {_each(found, point):,} tokens"
    return f"Operators of a {point.phase} of {size}, {number(1e3 * point.seconds)} ms"


def memory_lines(found: Survey) -> list[str]:
    """Returns the largest batch, and the use of each GPU's memory."""
    memory, settings = found.memory, found.settings
    batch = found.largest
    ends = "KV blocks" if batch.limit == "memory" else f"max_num_seqs={settings.engine.max_num_seqs}"
    return [
        f"Largest batch at {settings.context:,} tokens of context: {batch.num_seqs:,} sequences (limited by "
        f"{ends}; {memory.num_blocks:,} blocks of {memory.block_size} tokens).",
        f"Memory per GPU: {memory.weights_bytes / GIB:.1f} GiB weights, {memory.kv_bytes / GIB:.1f} "
        f"GiB KV cache, {(memory.fixed_bytes - memory.weights_bytes) / GIB:.1f} GiB other; "
        f"{memory.kv_bytes_per_token / 1024:.4g} KiB of KV per token.",
    ]


def _ridges(found: Survey) -> Table:
    """Builds the table of ridge points, with the one of the model's data type marked."""
    device = found.settings.hardware
    rows = [
        [
            f"{dtype} (model)" if dtype == found.compute_dtype else dtype,
            number(device.peak_flops_per_s[dtype] / 1e12),
            number(device.memory_bandwidth_bytes_per_s / 1e12),
            number(ridge),
        ]
        for dtype, ridge in ridge_points(device).items()
    ]
    return plain_table([["ridge point of", "TFLOP/s", "TB/s", "FLOP/byte"], *rows])


def _points(found: Survey) -> Table:
    headings = ["", "batch", "tokens each", "FLOP/byte", "ms", "tokens/s", "MFU", "MBU", "bound by"]
    return plain_table([headings, *(_point(found, point) for point in found.points)], (0, 8))


def _point(found: Survey, point: OperatingPoint) -> list[str]:
    fits = _fits(found, point)
    return [
        point.phase,
        f"{point.num_seqs:,}{'' if fits else ' *'}",
        f"{_each(found, point):,}",
        number(point.intensity),
        number(1e3 * point.seconds),
        number(point.tokens_per_s),
        percent(point.mfu),
        percent(point.mbu),
        f"{point.bound} {100 * point.bound_share:.0f} %",
    ]


def _drafts(found: Survey) -> Table:
    """Builds the table of passes with draft tokens, and of what they must give to be worth it."""
    proposer = found.settings.speculation
    assert proposer is not None
    method = f"{proposer.method}, {plural(proposer.num_speculative_tokens, 'draft token')}"
    headings = [method, "batch", "decode ms", "verify ms", "drafting ms", "break-even", "at most"]
    rows = [
        [
            "",
            f"{batch.num_seqs:,}",
            *(number(1e3 * seconds) for seconds in (batch.plain_s, batch.pass_s, batch.drafting_s)),
            f"{batch.break_even:.2f} tokens",
            f"{batch.most_tokens / batch.break_even:.2f}x",
        ]
        for batch in found.drafted
    ]
    return plain_table([headings, *rows], (0,))


def _fits(found: Survey, point: OperatingPoint) -> bool:
    return point.phase == "prefill" or point.num_seqs <= found.largest.num_seqs


def _each(found: Survey, point: OperatingPoint) -> int:
    return found.settings.context if point.phase == "decode" else found.settings.prompt


def _operators(operators: Sequence[Explained]) -> Table:
    shown = [line for line in operators if line.share >= MIN_SHARE]
    rows = [
        [
            line.operator,
            number(line.calls) if line.calls else "",
            number(1e6 * line.seconds),
            percent(line.share),
            number(line.flops / 1e9),
            number(line.bytes_moved / 1e6),
            line.bound,
        ]
        for line in shown
    ]
    others = [line for line in operators if line.share < MIN_SHARE]
    if others:
        seconds, share = sum(line.seconds for line in others), sum(line.share for line in others)
        name = plural(len(others), "other")
        rows.append([name, "", number(1e6 * seconds), percent(share), "", "", ""])
    return plain_table([["operator", "calls", "us", "share", "GFLOP", "MB", "bound"], *rows], (0, 6))
