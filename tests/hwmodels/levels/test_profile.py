"""Tables that are refused: columns, values and operators of a profile."""

import numpy as np
import pytest

from hwmodels.levels.profile import Profile
from tests.hwmodels.levels.measured_rows import APART, ATTENTION, GEMM, MIXED, columns


def changed(table, row, **values):
    return [*table[:row], table[row] | values, *table[row + 1 :]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            columns(changed(GEMM, 1, latency_us=0)),
            r"profile, row 1 \(qkv_proj\): latency_us=0: must be finite",
        ),
        (
            columns(changed(GEMM, 1, latency_us=-3)),
            r"row 1 \(qkv_proj\): latency_us=-3: must be finite and > 0",
        ),
        (columns(changed(GEMM, 2, num_tokens=0)), r"row 2 \(qkv_proj\): num_tokens=0: must be a number >= 1"),
        (columns(changed(GEMM, 2, num_tokens=10)), r"row 2 \(qkv_proj\): num_tokens=10 occurs twice"),
        (
            columns(changed(GEMM, 2, calls=3)),
            r"row 2 \(qkv_proj\): calls=3.0: row 0 of the same operator says 2",
        ),
        (columns(changed(GEMM, 0, calls=1.5)), r"row 0 \(qkv_proj\): calls=1.5: must be a whole number >= 1"),
        (columns(changed(GEMM, 2, component="gem")), "row 2: component=gem: must be one of gemm"),
        (
            columns(APART[:1], ATTENTION[1:]),
            "row 1 .attention.: chunks_apart=0: row 0 of the same operator says 1",
        ),
        (
            columns(APART, [row | {"chunks_apart": 1} for row in MIXED]),
            "chunks_apart=1: must have no rows",
        ),
        (
            columns(ATTENTION, [row | {"prefill_seqs": 2} for row in ATTENTION[-1:]]),
            "prefill_seqs > 1: must not occur with chunks_apart=0",
        ),
        (columns(GEMM[:1]), "qkv_proj has a single row; two sizes or more"),
        (columns(ATTENTION[:4]), "attention has no rows of a prompt chunk alone"),
        (columns(ATTENTION[4:]), "attention has no rows of decodes alone"),
        (columns(ATTENTION[:3], ATTENTION[4:]), "no row at decode_seqs=10, decode_kv_tokens=1100 and none"),
        (
            columns(ATTENTION, changed(ATTENTION, 0, operator="mla")[:1]),
            "a second operator of component attention",
        ),
        (
            columns(changed(ATTENTION, 0, decode_seqs=0)),
            r"row 0 \(attention\): decode_seqs=0: attention needs",
        ),
        (
            {name: column for name, column in columns(GEMM).items() if name != "num_tokens"},
            "profile: has no column num_tokens; it has operator, component, calls, latency_us",
        ),
        ({**columns(GEMM), "calls": np.array([2])}, "profile: columns differ in length"),
        ({name: column[:0] for name, column in columns(GEMM).items()}, "profile: holds no row"),
    ],
)
def test_profile_rejects(rows, message):
    with pytest.raises(ValueError, match=message):
        Profile.from_rows(rows)
