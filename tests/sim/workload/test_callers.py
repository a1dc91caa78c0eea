"""Requests of several tenants for several models: shares, conversations and assignment."""

from collections import Counter

import pytest

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
CALLERS = ["workload=callers", "workload.of.num_requests=400", "output.report=false"]
MODELS = "++workload.models={llama-3.1-8b: 3, llama-3.1-70b: 1}"
TWO = [*CALLERS, "pools=two_models", MODELS, "++workload.tenants={a: 1}"]


def run(*overrides):
    scenario, source = build_run(SOURCE.compose(list(overrides)))
    return scenario.run(source).in_pandas()


def test_tenants_get_their_shares():
    tenants = Counter(run(*CALLERS).requests["tenant"])
    assert sum(tenants.values()) == 400
    assert tenants["large"] / 400 == pytest.approx(0.8, abs=0.06)  # 3 standard deviations


def test_a_conversation_stays_with_its_tenant():
    requests = run(
        "workload=callers", "workload@workload.of=conversation", "workload.of.num_conversations=30"
    ).requests
    assert requests.groupby("session_id")["tenant"].nunique().max() == 1
    assert requests["tenant"].nunique() == 2


def test_every_request_goes_to_a_replica_of_its_model():
    result = run(*TWO, "routing=prefix_affinity")
    served = {0: "llama-3.1-70b", 1: "llama-3.1-8b", 2: "llama-3.1-8b"}
    assert (result.requests["replica"].map(served) == result.requests["model"]).all()
    assert result.requests["replica"].nunique() == 3
    assert set(result.requests["status"]) == {"finished"}


def test_each_model_has_a_router_of_its_own():
    """Round robin over two replicas sends the small model's requests to 1, 2, 1, 2 whatever comes between."""
    requests = run(*TWO, "routing=round_robin").requests.sort_values("arrival_s")
    small = requests[requests["model"] == "llama-3.1-8b"]["replica"].tolist()
    assert small == [1 + turn % 2 for turn in range(len(small))]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["++workload.models={gpt: 1}"], "workload.models.gpt: no pool serves it; served: llama-3.1-8b"),
        (
            ["pools=two_models"],
            "pools: serve llama-3.1-70b, llama-3.1-8b, but .* choose workload=callers",
        ),
        (["++workload.tenants={a: 0}"], "workload.tenants.a=0.0: must be a finite share > 0"),
        (["workload.tenants=null"], "workload.tenants"),
    ],
)
def test_bad_shares_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        run(*CALLERS, *overrides)
