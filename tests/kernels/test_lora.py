"""LoRA: shrink and expand against their references, on segments of every odd kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import Segments, lora_expand, lora_expand_reference, lora_shrink, lora_shrink_reference


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def segments_of(lengths, adapters):
    return Segments(int32([0, *lengths]).cumsum(0).to(torch.int32), int32(adapters))


@settings(max_examples=14)
@given(
    segments=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 15, 17, 34]), st.integers(-1, 2)), min_size=1, max_size=4
    ),
    k=st.sampled_from([16, 48, 80]),
    n=st.sampled_from([8, 33]),
    rank=st.sampled_from([8, 16, 24, 64]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    tight=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_reference(guarded, generator, assert_close, segments, k, n, rank, dtype, tight, seed):
    random = generator(seed)
    lengths, adapters = zip(*segments, strict=True)
    starts, used, _ = segments_of(lengths, adapters)
    given = Segments(guarded(starts), guarded(used), max(lengths) if tight else None)
    num_tokens = sum(lengths)
    a, b = (torch.randn(shape, generator=random).to(dtype) for shape in ((3, rank, k), (3, n, rank)))
    for adapter in range(3):  # an unused adapter must not be read
        if adapter not in adapters:
            a[adapter] = b[adapter] = torch.nan
    a, b = guarded(a), guarded(b)
    scaling = guarded(torch.rand(3, generator=random))
    x = guarded(torch.randn(num_tokens, k, generator=random).to(dtype))
    parts = lora_shrink(x, a, given)
    expected = lora_shrink_reference(x, a, given)
    summed_as = torch.float32 if dtype == torch.float32 else torch.float16
    assert_close(parts.sum(0), expected.sum(0), terms=k, dtype=summed_as)
    out = torch.randn(num_tokens, n, generator=random).to(dtype)
    actual = guarded(out)
    lora_expand(guarded(parts), b, scaling, given, actual)
    lora_expand_reference(expected, b, scaling, given, out)
    assert_close(actual, out, terms=rank * k)


@pytest.mark.parametrize("slices", [(40, 40), (40, 8, 72), (33, 1, 7)])
def test_stacked_slices_reach_their_columns_only(guarded, generator, assert_close, slices):
    """A fused projection: A stacked along ranks, B along outputs; adapters are views of one buffer."""
    random, rank, width = generator(0), 16, sum(slices)
    given = segments_of([2, 3], [1, 0])
    memory = torch.randn(2, len(slices) * rank * 32 + width * rank, generator=random).half()
    a = memory[:, : len(slices) * rank * 32].unflatten(1, (-1, 32))
    b = memory[:, len(slices) * rank * 32 :].unflatten(1, (width, rank))
    x = torch.randn(5, 32, generator=random).half()
    scaling = torch.tensor([2.0, 0.5])
    out, whole = torch.zeros(5, width, dtype=torch.float16), torch.zeros(5, width, dtype=torch.float16)
    actual = guarded(out)
    parts = lora_shrink(x, a, given)
    lora_expand(parts, b, scaling, given, actual, slices=slices)
    lora_expand_reference(lora_shrink_reference(x, a, given), b, scaling, given, whole, slices=slices)
    ends = torch.tensor(slices).cumsum(0).tolist()
    for token, adapter in enumerate([1, 1, 0, 0, 0]):
        for s, end in enumerate(ends):
            columns = slice(end - slices[s], end)
            shrunk = (a[adapter, s * rank : (s + 1) * rank].float() @ x[token].float()).half().float()
            out[token, columns] = (scaling[adapter] * b[adapter, columns].float() @ shrunk).half()
    assert_close(actual, out, terms=512)
    assert_close(whole, out, terms=512)


def test_tokens_without_an_adapter_stay_as_they_are(generator):
    given = segments_of([2, 1, 2], [-1, 0, -1])
    x, a, b = (
        torch.randn(shape, generator=generator(1)).half() for shape in ((7, 16), (1, 8, 16), (1, 8, 8))
    )
    parts = lora_shrink(x, a, given)
    assert bool((parts[:, [0, 1, 3, 4]] == 0).all())
    out = torch.ones(7, 8, dtype=torch.float16)
    lora_expand(parts, b, torch.ones(1), given, out)
    assert bool((out[[0, 1, 3, 4, 5, 6]] == 1).all())  # two tokens lie behind the last segment
    assert not bool((out[2] == 1).any())


def test_many_tokens_of_one_segment(guarded, generator, assert_close):
    given = segments_of([70], [0])
    x, a = (guarded(torch.randn(shape, generator=generator(2)).half()) for shape in ((70, 48), (1, 24, 48)))
    actual = lora_shrink(x, a, given)
    assert_close(actual.sum(0), lora_shrink_reference(x, a, given)[0], terms=48, dtype=torch.float16)


def test_refusals():
    given = segments_of([2], [0])
    x, a, b = torch.zeros(2, 16).half(), torch.zeros(1, 8, 16).half(), torch.zeros(1, 8, 8).half()
    with pytest.raises(ValueError, match=r"x is torch.float32, A torch.float16"):
        lora_shrink(x.float(), a, given)
    with pytest.raises(ValueError, match="same multiple of 16"):
        lora_shrink(x[:, :8], a, given)
    with pytest.raises(ValueError, match="2 segments need 3 starts"):
        lora_shrink(x, a, given._replace(adapters=int32([0, 0])))
    parts, out = torch.zeros(1, 2, 8), torch.zeros(2, 8)
    with pytest.raises(ValueError, match="rank 65: must be at most 64"):
        lora_expand(parts, torch.zeros(1, 8, 65).half(), torch.ones(1), given, out)
    with pytest.raises(ValueError, match=r"out is \[2, 9\]; must be \[2, 8\]"):
        lora_expand(parts, b, torch.ones(1), given, torch.zeros(2, 9))
    with pytest.raises(ValueError, match=r"slices=\[4, 5\]: must be up to 3 numbers with a sum of 8 outputs"):
        lora_expand(parts, b, torch.ones(1), given, out, slices=(4, 5))
    with pytest.raises(ValueError, match=r"slices=.*must be up to 3"):
        lora_expand(parts, b, torch.ones(1), given, out, slices=(2, 2, 2, 2))
    with pytest.raises(ValueError, match="parts have 8 ranks; must be 16 for 2 slices"):
        lora_expand(parts, b, torch.ones(1), given, out, slices=(4, 4))
    with pytest.raises(ValueError, match="scaling is"):
        lora_expand(parts, b, torch.ones(2), given, out)
