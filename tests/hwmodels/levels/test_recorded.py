"""Replaying recorded iterations."""

import numpy as np
import pytest

from hwmodels.iterations import COMPONENTS, Explained, IterationShape, UnknownIterationError
from hwmodels.levels.recorded import Recorded

NOTHING = dict.fromkeys(COMPONENTS, 0.0)


class Base:
    """Prices anything at one second, a quarter of it attention."""

    peak_flops_per_s = 1e15
    peak_bytes_per_s = 4e12

    def seconds(self, shape):
        return 1.0

    def breakdown(self, shape):
        return NOTHING | {"gemm": 0.75, "attention": 0.25}

    def explain(self, shape):
        return [
            Explained("qkv_proj", "gemm", 0.5, 0.5, "memory", 1.0, 2.0, 4.0),
            Explained("o_proj", "gemm", 0.25, 0.25, "memory", 1.0, 2.0, 4.0),
            Explained("attention_decode", "attention", 0.25, 0.25, "launch", 1.0, 2.0, 4.0),
        ]

    def flops(self, shape):
        return 5.0 * shape.decode_seqs

    def bytes_moved(self, shape):
        return 7.0 * shape.decode_seqs


def make_iterations(**given):
    columns = dict.fromkeys(IterationShape._fields, np.zeros(4))
    columns |= {
        "decode_seqs": np.array([2, 2, 2, 2]),
        "decode_context_tokens": np.array([100, 102, 100, 100]),
        "sampled_seqs": np.array([2, 2, 2, 2]),
        "duration_s": np.array([0.1, 0.2, 0.3, 0.15]),
    }
    return columns | given


def make_recorded(allow_missing=False, **given):
    return Recorded.from_iterations(make_iterations(**given), base=Base(), allow_missing=allow_missing)


def decode(context):
    return IterationShape(2, context, 0, 0, 0, 0, 2)


def test_a_recorded_shape_takes_its_recorded_time():
    assert make_recorded().seconds(decode(102)) == 0.2


def test_a_shape_recorded_several_times_takes_the_median():
    assert make_recorded().seconds(decode(100)) == 0.15


def test_arrays_and_leaps_equal_their_elements():
    recorded = make_recorded()
    assert recorded.seconds(decode(np.array([102, 100]))).tolist() == [0.2, 0.15]
    assert recorded.decode_ends(1.0, 2, 100, 2) == [1.0 + 0.15, 1.0 + 0.15 + 0.2]


def test_an_unknown_shape_is_refused_with_its_fields():
    message = "recorded: no iteration of decode_seqs=2, decode_context_tokens=104, .* set allow_missing=true"
    with pytest.raises(ValueError, match=message):
        make_recorded().seconds(decode(104))
    with pytest.raises(UnknownIterationError, match="decode_context_tokens=104"):
        make_recorded().decode_ends(0.0, 2, 104, 3)


def test_a_leap_ends_before_what_lies_beyond_the_recording():
    """The leap may be cut before it gets there."""
    assert make_recorded().decode_ends(0.0, 2, 100, 3) == [0.15, 0.15 + 0.2]
    assert np.isnan(make_recorded().seconds(decode(np.array([104, 102])))).tolist() == [True, False]


def test_an_unknown_shape_asks_the_base_where_that_is_allowed():
    recorded = make_recorded(allow_missing=True)
    assert recorded.seconds(decode(np.array([104, 102]))).tolist() == [1.0, 0.2]
    assert recorded.decode_ends(0.0, 2, 102, 2) == [0.2, 1.2]


def test_breakdown_shares_the_recorded_time_out_as_the_base_does():
    parts = make_recorded().breakdown(decode(102))
    assert parts == pytest.approx(NOTHING | {"gemm": 0.15, "attention": 0.05})


def test_explain_shares_the_recorded_time_out_as_the_base_does():
    lines = make_recorded().explain(decode(102))
    assert [(line.operator, line.seconds, line.share) for line in lines] == [
        ("qkv_proj", pytest.approx(0.1), pytest.approx(0.5)),
        ("o_proj", pytest.approx(0.05), pytest.approx(0.25)),
        ("attention_decode", pytest.approx(0.05), pytest.approx(0.25)),
    ]


class Slow(Base):
    """At most 1 FLOP and 1 byte a second: 10 FLOPs for two decodes."""

    peak_flops_per_s = peak_bytes_per_s = 1.0


def test_rejects_durations_below_the_physical_limit():
    with pytest.raises(ValueError, match=r"recorded, row 0: duration_s=0.1: .* less than 14 s; check"):
        Recorded.from_iterations(make_iterations(), base=Slow())
    # 14 bytes, of which the cache holds 9: 10 FLOPs remain the limit. 8 s is within a fifth of it.
    durations = np.array([8.0, 8.0, 8.0, 7.9])
    with pytest.raises(ValueError, match=r"recorded, row 3: duration_s=7.9: .* less than 10 s"):
        Recorded.from_iterations(make_iterations(duration_s=durations), base=Slow(), cached_bytes=9)


def test_work_and_peaks_are_the_bases():
    recorded = make_recorded()
    assert (recorded.flops(decode(102)), recorded.bytes_moved(decode(102))) == (10, 14)
    assert (recorded.peak_flops_per_s, recorded.peak_bytes_per_s) == (1e15, 4e12)


@pytest.mark.parametrize("duration", [0, -1, np.nan, np.inf])
def test_rejects_durations_that_no_iteration_can_have(duration):
    durations = np.array([0.1, duration, 0.3, 0.15])
    with pytest.raises(
        ValueError, match=f"recorded, row 1: duration_s={duration:g}: must be finite and > 0 s"
    ):
        make_recorded(duration_s=durations)


def test_rejects_a_table_without_a_needed_column():
    iterations = make_iterations()
    del iterations["prefill_pairs"]
    with pytest.raises(ValueError, match="iterations: has no column prefill_pairs; it has decode_seqs"):
        Recorded.from_iterations(iterations, base=Base())
