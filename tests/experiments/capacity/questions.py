"""Small questions of a capacity search, and runs with given figures."""

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.capacity.candidates import build_candidates, build_question
from experiments.capacity.probe import Run
from experiments.capacity.settings import CapacitySettings
from sim.metrics.slo import Slo

SOURCE = ConfigSource(config_name="capacity", dirs=[CONFIG_DIR])
SMALL = ("model=smollm2_135m", "workload=poisson", "workload.num_requests=120")
TINY = (
    *SMALL,
    "workload.arrivals.rate_per_s=60",
    "engine.max_num_seqs=8",
    "capacity.hardware=[l4,l40s]",
    "capacity.tensor_parallel_sizes=[1]",
    "capacity.quantisations=[]",
    "capacity.jobs=1",
    "hydra.run.dir=out",
)
SLO = Slo(name="toy", ttft_ms=500, tpot_ms=50)
SCENARIO = build_candidates(
    CapacitySettings(), Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), [*SMALL])
)[0][0]


def question_of(*overrides):
    given_all = [*SMALL, *overrides]
    return build_question(SOURCE.compose(given_all), SOURCE, given_all)


def run_with(share, *, cut=False, **figures):
    names = ("usd_per_million_output_tokens", "output_tokens_per_s", "goodput_per_s", "tpot_p50_s", "watts")
    names += ("bill_usd_per_hour",)
    return Run(
        share=share,
        is_cut=cut,
        rate_per_s=1.0,
        term_shares={"ttft": share, "tpot": 1.0},
        term_limits_s={"ttft": 0.4, "tpot": 0.04},
        loosened_s={"ttft": 0.4, "tpot": 0.04},
        figures=dict.fromkeys(names, 1.0) | figures,
        waits={},
        batch=(1.0, 10.0),
        notes=(),
    )
