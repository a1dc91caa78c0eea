"""Encoder replicas: delays worked out on paper, queues, the encoder cache, and refused settings."""

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from policies.core.request import Prompt, Request
from sim.cluster.disaggregation import Encoders, EncoderSettings
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SMALL = (
    *("model=llama3_2_1b", "hardware=h100_sxm", "workload=poisson", "workload.num_requests=20"),
    *("workload.lengths.prompt_tokens.value=1152", "workload.arrivals.rate_per_s=1"),
)


def run(*overrides):
    scenario, source = build_run(SOURCE.compose([*SMALL, *overrides]))
    return scenario.run(source).in_pandas()


class At:
    """A clock that stands at a time."""

    def __init__(self, now):
        self.now = now


@pytest.fixture
def make_encoders():
    def make(now=1.0, **settings):
        scenario, _ = build_run(SOURCE.compose([*SMALL]))
        [pool] = scenario.replica_pools()
        encoders = Encoders(EncoderSettings(**settings), pool, scenario.network, At(now), seed=0)
        encoders._encode_s, encoders._send_s = 0.25, 0.125
        return encoders

    return make


def test_images_are_encoded_at_the_same_time_and_sent_one_after_the_other(make_encoders):
    assert make_encoders(replicas=2)._ready_s(0, 2) == 1.0 + 0.25 + 2 * 0.125


def test_images_wait_for_a_free_encoder(make_encoders):
    """One encoder: encoded at 1.25 and 1.5, sent by 1.375 and 1.625; the next request begins at 1.5."""
    encoders = make_encoders(replicas=1)
    assert encoders._ready_s(0, 2) == 1.625
    assert encoders._ready_s(1, 1) == 1.75 + 0.125


def test_cached_images_are_only_sent(make_encoders):
    assert make_encoders(replicas=1, hit_share=1.0)._ready_s(0, 3) == 1.0 + 3 * 0.125


def test_seconds_of_an_image_are_flops_over_flops_per_s():
    """A prompt of 1,152 tokens has one image of 576; 0.38e12 / (989e12 x 0.4) = 0.96 ms."""
    settings = EncoderSettings(replicas=1)
    assert settings.num_images(Request(0, 0.0, Prompt(1152))) == 1
    result = run("encoders.replicas=1")
    assert "1 H100 SXM encode images in 0.96 ms each" in " ".join(result.summary["notes"])


def test_a_first_token_comes_later_by_encoding_and_sending():
    """At one request per second no request waits for another one."""
    plain, slow = run(), run("encoders.replicas=1", "encoders.flops_per_image=3.956e13")
    later_s = slow.records.requests["first_token_s"] - plain.records.requests["first_token_s"]
    assert later_s.median() == pytest.approx(0.1, rel=0.01)


def test_without_encoders_nothing_changes_and_leaps_equal_steps():
    leaped = run("encoders.replicas=2", "workload.arrivals.rate_per_s=50")
    stepped = run("encoders.replicas=2", "workload.arrivals.rate_per_s=50", "sim.leap=false")
    assert leaped.records.requests.equals(stepped.records.requests)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("encoders.replicas=-1", r"encoders\.replicas=-1: must be >= 0"),
        ("encoders.tokens_per_image=0", r"encoders\.tokens_per_image=0: must be >= 1"),
        ("encoders.hit_share=2", "encoders.hit_share=2: must be a share, >= 0 and <= 1"),
        ("encoders.mfu=0", "encoders.mfu=0: must be a share, > 0 and <= 1"),
        ("encoders.flops_per_image=0", r"encoders\.flops_per_image=0.*: must be a finite number > 0"),
    ],
)
def test_wrong_settings_are_refused(setting, message):
    with pytest.raises(ConfigError, match=message):
        run(setting)


def test_a_network_that_the_gpus_do_not_have_is_refused_before_the_run():
    overrides = ("hardware=v100_sxm", "network=infiniband", "encoders.replicas=1")
    with pytest.raises(ConfigError, match=r"network\.kind=infiniband: V100 32GB SXM2 has no such link"):
        build_run(SOURCE.compose([*SMALL, *overrides]))
