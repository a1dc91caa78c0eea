"""Saturation, with the numbers of llm-d's own unit tests of its utilization detector (v0.8.0)."""

from types import SimpleNamespace

import pytest

from policies.admission.saturation import Saturation


def replicas(*states):
    """Returns replicas with these (queue, used share of KV memory)."""
    return [
        SimpleNamespace(num_waiting=queue, num_free_kv_tokens=round(1000 * (1 - used)), num_kv_tokens=1000)
        for queue, used in states
    ]


@pytest.mark.parametrize(
    ("states", "saturation"),
    [
        ([(2, 0.5)], 0.5 / 0.9),
        ([(10, 0.1)], 2.0),
        ([(1, 0.95)], 0.95 / 0.90),
        ([(0, 0.0), (10, 0.0)], 1.0),
        ([(0, 0.45), (4, 0.0)], (0.5 + 0.8) / 2),
    ],
)
def test_saturation_is_the_mean_of_the_scarcer_resource(states, saturation):
    assert Saturation(max_kv_share=0.9).saturation(replicas(*states)) == pytest.approx(saturation)


def test_only_low_priorities_are_shed(make_request):
    full, free = replicas((5, 0.0)), replicas((4, 0.79))
    low, high = make_request(0, 10, priority=1), make_request(1, 10, priority=0)
    policy = Saturation(retry_after_s=2)
    assert policy.refusal(low, full, 0.0) == ("fleet saturated", 2)
    assert policy.refusal(high, full, 0.0) is None
    assert policy.refusal(low, free, 0.0) is None
    assert Saturation(max_kept_priority=None).refusal(high, full, 0.0) is not None


@pytest.mark.parametrize("settings", [{"max_queue": 0}, {"max_kv_share": 1.5}, {"max_kv_share": 0.0}])
def test_what_their_detector_refuses_is_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        Saturation(**settings)
