"""Directions in which prices of the roofline move: not down with more work, not up on a better device.

A batch is known by its sums: one more sequence, shorter than the others, lowers the mean context, so what
waits for the longest one is taken to end sooner. Batches here are alike.
"""

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.operators import Calibration
from hwmodels.operators.gemm import StreamCurve
from tests.hwmodels.assembly.drawn_iterations import NO_HOST, drawn_shapes, few

alike = st.tuples(
    st.sampled_from([0, 0, 1, 2, 3, 7, 8, 15, 40, 128, 300, 511]),
    st.integers(1, 200) | st.integers(1, 20_000),
    st.sampled_from([0, 0, 1, 2, 3, 8]),
    st.integers(1, 64) | st.integers(1, 800),
    st.just(0) | st.integers(0, 8192),
).filter(lambda counts: counts[0] + counts[2] > 0)
"""(decodes, context of each, chunks, new tokens of each, cached tokens of each)."""


def shape_of(make_shape, counts):
    decodes, context, chunks, new, cached = counts
    return make_shape([context] * decodes, [(new, cached)] * chunks)


@few
@given(counts=alike, more=st.tuples(*[st.integers(0, 4), st.integers(0, 500)] * 2, st.integers(0, 500)))
def test_a_larger_batch_of_longer_contexts_is_never_cheaper(roofline, make_shape, counts, more):
    """More sequences of the same kind, longer contexts, longer chunks, more cached tokens; all at once.

    A first chunk would end the replay of a graph, and with it the padding: both batches have chunks, or
    neither.
    """
    decodes, context, chunks, new, cached = (a + b for a, b in zip(counts, more, strict=True))
    larger = (decodes if counts[0] else 0, context, chunks if counts[2] else 0, new, cached)
    assert roofline.seconds(shape_of(make_shape, larger)) >= roofline.seconds(shape_of(make_shape, counts))


@few
@given(drawn=drawn_shapes, more=st.integers(1, 4096))
def test_longer_contexts_are_never_cheaper_whatever_the_batch(roofline, make_shape, drawn, more):
    shape = make_shape(*drawn)
    seconds = roofline.seconds(shape)
    if shape.decode_seqs:
        longer = shape._replace(decode_context_tokens=shape.decode_context_tokens + more)
        assert roofline.seconds(longer) >= seconds
    further = shape._replace(
        prefill_pairs=shape.prefill_pairs + more * shape.prefill_tokens,
        prefill_context_tokens=shape.prefill_context_tokens + more * shape.prefill_seqs,
    )
    assert roofline.seconds(further) >= seconds


figures = st.sampled_from(["memory", "peak", "bandwidth_bytes_per_s", "latency_s"])


@few
@given(counts=alike, figure=figures, factor=st.floats(1, 10))
@example(counts=(40, 165, 2, 710, 0), figure="bandwidth_bytes_per_s", factor=1.6)
def test_a_better_device_is_never_slower(kind, make_shape, counts, figure, factor):
    device, shape = kind["device"], shape_of(make_shape, counts)
    slow, fast = (
        Roofline(**{**kind, "device": d}, host=NO_HOST) for d in (device, better(device, figure, factor))
    )
    # In a pipeline the time between stages is added and taken off again: the last bit may go up.
    assert fast.seconds(shape) <= slow.seconds(shape) * (1 + 1e-12)


def better(device, figure, factor):
    """Returns the device with a larger memory bandwidth or peak, or with faster links."""
    if figure == "memory":
        return replace(device, memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s)
    if figure == "peak":
        peaks = {dtype: factor * peak for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, peak_flops_per_s=peaks)
    links = {name: getattr(device, name) for name in ("pcie", "scale_up", "inter_node")}
    times = 1 / factor if figure == "latency_s" else factor
    faster = {
        name: replace(link, **{figure: times * getattr(link, figure)}) for name, link in links.items() if link
    }
    return replace(device, **faster)


def test_a_curve_that_reaches_less_is_slower(models, devices, make_shape):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"], "host": NO_HOST}
    slow = Calibration(stream=StreamCurve(bandwidth_share=0.1))
    shape = make_shape(chunks=[(2048, 0)])
    assert Roofline(**asked, calibration=slow).seconds(shape) > Roofline(**asked).seconds(shape)
