"""The table of expected errors is written and read alike, refuses wrong rows, and finds the closest ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwmodels.trust import (
    ALL_ENGINES,
    ALL_GPUS,
    COLUMNS,
    OLD_COLUMNS,
    ExpectedError,
    Level,
    Place,
    errors_at,
    is_compared,
    read,
    shipped,
    written,
)

PATH = Path("errors.csv")
TPOT = ExpectedError("closed", "TPOT", "vllm", "H100 SXM", "dense", Level.measured, 93, 2, 5.25, 14.0)
OTHERS = (
    TPOT._replace(gpu=ALL_GPUS, rows=300, median_percent=6.0),
    TPOT._replace(gpu=ALL_GPUS, level=Level.relative, median_percent=9.0, p90_percent=30.0),
    TPOT._replace(gpu="A100 80GB SXM", rows=1),
    TPOT._replace(traffic="open", figure="ITL", median_percent=3.0),
    TPOT._replace(traffic="burst", groups=1, basis_groups=12),
    TPOT._replace(engine=ALL_ENGINES, gpu=ALL_GPUS, figure="TTFT"),
)


def test_table_is_read_as_it_was_written():
    rows = (TPOT, *OTHERS)
    assert read(written(rows), PATH) == rows


def test_table_of_plain_percentiles_is_read_too():
    head, *lines = (line.rpartition(",")[0] for line in written([TPOT, *OTHERS]).splitlines())
    assert tuple(head.split(",")) == OLD_COLUMNS
    found = read("\n".join([head, *lines]), PATH)
    assert found == tuple(row._replace(basis_groups=0) for row in (TPOT, *OTHERS))
    assert not any(row.is_widened for row in found)


def test_shipped_table_is_valid_and_has_every_level():
    assert {row.level for row in shipped()} == set(Level)
    assert {row.architecture for row in shipped()} == {"dense", "moe"}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "traffic",
            "half-open",
            r"line 2: traffic=half-open: must be one of closed, open, burst, lora; write the",
        ),
        ("figure", "ITL", r"figure=ITL: must be one of TTFT, TPOT, E2E, throughput, throughput ratio"),
        ("architecture", "ssm", r"architecture=ssm: must be one of dense, moe"),
        ("level", "guessed", r"level=guessed: must be one of measured, relative"),
        ("rows", "0", r"rows=0: must be a number >= 1"),
        ("median_percent", "-1", r"median_percent=-1: must be a number >= 0"),
        ("median_percent", "nan", r"median_percent=nan: must be a number >= 0"),
        ("median_percent", "15", r"median_percent=15: must be <= p90_percent=14"),
        ("p90_percent", "much", r"p90_percent=much: must be a number >= 0"),
        ("basis_groups", "-2", r"basis_groups=-2: must be a number >= 0"),
    ],
)
def test_wrong_cell_is_refused_with_its_line(column, value, message):
    head, line = written([TPOT]).splitlines()
    cells = line.split(",")
    cells[COLUMNS.index(column)] = value
    with pytest.raises(ValueError, match=rf"^errors\.csv: .*{message}"):
        read(f"{head}\n{','.join(cells)}\n", PATH)


def test_wrong_columns_short_rows_and_repeated_rows_are_refused():
    text = written([TPOT])
    with pytest.raises(ValueError, match="line 1: columns : must be traffic,figure"):
        read("", PATH)
    with pytest.raises(ValueError, match="line 2: 10 cells: must be 11"):
        read(text.rstrip("\n").rpartition(",")[0], PATH)
    with pytest.raises(ValueError, match="line 3: closed,TPOT,vllm,H100 SXM,dense occurs twice"):
        read(text + text.splitlines()[1], PATH)


def test_rows_of_the_gpu_come_before_those_of_all_gpus():
    def found(**given):
        place = Place(
            **{"engine": "vllm", "gpu": "H100 SXM", "architecture": "dense", "level": Level.measured, **given}
        )
        return errors_at((TPOT, *OTHERS), place, "closed")

    of_all = {"TTFT": OTHERS[-1]}
    assert found() == {"TPOT": TPOT} | of_all
    assert found(gpu="A100 80GB SXM") == {"TPOT": OTHERS[0]} | of_all  # one row is too few
    few = TPOT._replace(gpu="A100 80GB SXM", rows=1, groups=1, basis_groups=12)
    place = Place("vllm", "A100 80GB SXM", "dense", Level.measured)
    assert errors_at((TPOT, OTHERS[0], few), place, "closed") == {
        "TPOT": few
    }  # but has the band of 12 groups
    assert found(gpu="L40S", level=Level.relative) == {"TPOT": OTHERS[1]}
    assert found(architecture="moe") == {}
    assert found(engine="sglang") == of_all
    assert is_compared(OTHERS, Place("vllm", "L40S", "dense", Level.relative))
    assert not is_compared(OTHERS, Place("sglang", "H100 SXM", "dense", Level.measured))
