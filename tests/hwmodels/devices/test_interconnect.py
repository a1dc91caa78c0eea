"""Settings that links refuse."""

import math

import pytest

from hwmodels.device import Link


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s=0.0: must be a finite number > 0 bytes/s"),
        (
            {"bandwidth_bytes_per_s": math.inf},
            "bandwidth_bytes_per_s=inf: must be a finite number > 0 bytes/s",
        ),
        (
            {"bandwidth_bytes_per_s": math.nan},
            "bandwidth_bytes_per_s=nan: must be a finite number > 0 bytes/s",
        ),
        ({"latency_s": -1e-6}, "latency_s=-1e-06: must be a finite number >= 0 s"),
        ({"latency_s": math.nan}, "latency_s=nan: must be a finite number >= 0 s"),
    ],
)
def test_link_rejects_impossible_figures(given_settings, message):
    with pytest.raises(ValueError, match=message):
        Link(**{"name": "x", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, **given_settings})
