"""The angles of rotary positions, written out as in the models' own code."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.rope_angles import cos_sin_table, rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_llama3_scaling_matches_its_formula():
    """Written out as in the Llama 3.1 code: by wavelength, three branches."""
    frequencies, factor = rope_frequencies(128, 500000.0, LLAMA3)
    plain, _ = rope_frequencies(128, 500000.0)
    assert factor == 1.0
    for ours, frequency in zip(frequencies.tolist(), plain.tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert ours == pytest.approx(expected, rel=1e-6)
    assert frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(plain[-1].item() / 8, rel=1e-6)


def test_yarn_scaling_matches_its_formula():
    """Pairs that turn over 32 times in the original context are kept, under once: slowed by the factor."""
    frequencies, factor = rope_frequencies(128, 1e6, YARN)
    plain, _ = rope_frequencies(128, 1e6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    turns = 32768 * plain / (2 * math.pi)
    assert torch.equal(frequencies[turns > 33 * 1.3], plain[turns > 33 * 1.3])
    slow = turns < 0.75
    torch.testing.assert_close(frequencies[slow], plain[slow] / 4)
    share = frequencies / plain
    assert bool((share.diff() <= 1e-12).all())  # a ramp between
    assert bool(((share > 0.26) & (share < 0.99)).any())


def test_yarn_of_deepseek_takes_the_ratio_of_its_magnitudes():
    scaling = {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}
    _, factor = rope_frequencies(64, 1e4, scaling)
    assert factor == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert rope_frequencies(64, 1e4, {**scaling, "attention_factor": 1.5})[1] == 1.5
    table = cos_sin_table(64, 2, base=1e4, scaling=scaling)
    assert table[0, 0] == pytest.approx(factor)


def test_linear_scaling_divides_and_table_is_cosines_then_sines():
    plain, linear = cos_sin_table(8, 9), cos_sin_table(8, 9, scaling={"type": "linear", "factor": 2.0})
    torch.testing.assert_close(linear[8], plain[4])
    torch.testing.assert_close(plain[:, 0], torch.arange(9.0).cos())
    torch.testing.assert_close(plain[:, 4], torch.arange(9.0).sin())


@pytest.mark.parametrize(
    ("scaling", "said"),
    [({"rope_type": "dynamic"}, "llama3 or yarn"), ({"rope_type": "llama3"}, "is missing in")],
)
def test_scaling_rejects(scaling, said):
    with pytest.raises(ValueError, match=said):
        cos_sin_table(64, 4, scaling=scaling)
