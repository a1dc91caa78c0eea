"""Settings with which running requests cannot move between replicas."""

import subprocess
import sys

import pytest

from sim import simulate
from sim.settings.errors import ConfigError

USUAL = {"migration": "llumnix", "replicas": 2, "workload": "poisson", "workload__num_requests": 20}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replicas": 1}, "migration=llumnix, replicas=1: no pool has another replica"),
        ({"sim__shards": 2}, "sim.shards=2: requests move between replicas of different shards"),
        ({"sim__thin": 2, "replicas": 4}, "sim.thin=2: a part of a fleet has fewer replicas"),
        ({"failures": "crash"}, "failures: a crash during a migration is not modelled"),
        ({"recovery": "kv"}, "recovery=kv: copies of KV"),
        ({"pools": "disaggregated", "replicas": None}, "role=prefill: requests of such pools move once"),
        ({"batching": "static"}, "batching=static: takes no request into a batch that runs"),
        ({"speculation": "ngram"}, "speculation=ngram: its draft tokens do not move"),
        (
            {"caching": "contiguous"},
            "caching=contiguous: gives a sequence its memory other than block by block",
        ),
        ({"caching": "h2o"}, "caching=h2o: gives a sequence its memory other than block by block"),
        ({"hardware": "a10g", "model": "llama2_7b"}, "network.kind=auto: A10G has no such link"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ConfigError, match=message) as error:
        simulate(**{name: value for name, value in (USUAL | settings).items() if value is not None})
    assert "; " in str(error.value)


def test_a_run_with_a_policy_has_figures_and_others_have_none():
    found = simulate(**USUAL).summary
    assert found["migrations"]["count"] == 0
    assert "migrations" not in simulate(**USUAL | {"migration": "none"}).summary


def test_a_plain_run_does_not_import_the_mechanism():
    code = (
        "import sys; from sim import simulate; simulate(workload='poisson', workload__num_requests=5); "
        "assert not [name for name in sys.modules if name.startswith('sim.migration')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
