"""Cases of a validation: composed as on the command line, one for every policy that the engine runs."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.calibrate.engine.served import architecture_of
from experiments.validate.engine.engine_run import settings_of
from experiments.validate.engine.suite import MEASURED_GROUPS, cases_of, model_of
from experiments.validate.fidelity.settings import Suite, split
from policies.batching import supports_mixed_role
from realengine.settings import EngineSettings
from sim.settings.build import build
from sim.settings.compose import Composition, ConfigSource
from sim.settings.config_groups import CONFIG_DIR, find_groups
from sim.settings.errors import ConfigError

pytestmark = pytest.mark.xdist_group("suite")  # its tests share the policies of all cases

SOURCE = ConfigSource(config_name="validate", dirs=[CONFIG_DIR])
CPU = torch.device("cpu")
KINDS = ("batching", "scheduling", "caching")
GROUPS = find_groups([CONFIG_DIR])
SUITES = [choice.name for choice in GROUPS["suite"]]


def cases(suite, *overrides, device="cpu"):
    given = [f"device={device}", *overrides]
    return {case.name: case for case in cases_of(Composition(SOURCE, given), suite, device, None)}


def suite_of(name):
    settings, _ = split(SOURCE.compose(["device=cpu", f"suite={name}"]))
    return settings.suite


def test_a_case_wins_over_the_command_line_and_that_over_the_base():
    suite = Suite(
        cases={"own": ("seed=3", "batching=tgi"), "plain": ()},
        base=("seed=1", "batching=orca", "workload.num_requests=7"),
    )
    found = cases(suite, "seed=2", "batching=static")
    seeds = {name: case.scenario.seed for name, case in found.items()}
    assert seeds == {"own": 3, "plain": 2}
    batching = {name: type(case.scenario.batching).__name__ for name, case in found.items()}
    assert batching == {"own": "Tgi", "plain": "Static"}
    assert {case.config["workload"]["num_requests"] for case in found.values()} == {7}
    assert {name: case.scenario.seed for name, case in cases(suite).items()} == {"own": 3, "plain": 1}


def test_a_setting_that_is_given_twice_counts_once_however_it_is_written():
    suite = Suite(cases={"run": ("++seed=3", "load=null")}, base=("+seed=1",))
    case = cases(suite, "seed=2", "load=0.9")["run"]
    assert (case.scenario.seed, case.settings.load) == (3, None)


def test_another_choice_in_a_group_leaves_nothing_of_what_was_set_in_the_one_before():
    suite = Suite(
        cases={"own": ("batching=tgi",), "plain": ()},
        base=("batching=static", "batching.batch_size=3", "workload/lengths=fixed"),
    )
    found = cases(suite, "workload=validation")
    assert type(found["own"].scenario.batching).__name__ == "Tgi"
    assert found["plain"].scenario.batching.batch_size == 3
    lengths = {case.config["workload"]["lengths"]["prompt_tokens"]["_target_"] for case in found.values()}
    assert lengths == {"sim.workload.distributions.Lognormal"}


def test_each_device_has_its_own_defaults_which_the_command_line_overrides():
    suite = suite_of("single")
    case = cases(suite, "hydra.run.dir=elsewhere")["run"]
    assert (case.scenario.model.name, case.scenario.model.dtype) == ("random-8m", "fp32")
    assert case.settings.thresholds.name == "cpu"
    case = cases(suite, "model=smollm2_135m", "model.dtype=bf16", "thresholds=none")["run"]
    assert (case.scenario.model.name, case.scenario.model.dtype) == ("smollm2-135m", "bf16")
    case = cases(suite, device="cuda")["run"]
    assert (case.settings.thresholds.name, case.scenario.model.dtype) == ("gpu", "bf16")


@pytest.mark.parametrize("group", MEASURED_GROUPS)
def test_what_is_measured_cannot_be_chosen(group):
    choice = GROUPS[group][0].name
    message = f"{group}={choice}: device=cpu is measured; remove {group}="
    with pytest.raises(ConfigError, match=f"^{message}"):
        cases(suite_of("single"), f"{group}={choice}")
    with pytest.raises(ConfigError, match=f"^case two: {message}"):
        cases(Suite(cases={"one": (), "two": (f"{group}={choice}",)}))


def test_single_settings_of_what_is_measured_may_be_given():
    case = cases(suite_of("single"), "engine.max_num_seqs=5")["run"]
    assert case.scenario.engine.max_num_seqs == 5


def test_several_models_are_refused_with_the_case():
    suite = Suite(cases={"one": (), "two": (), "three": ("model=smollm2_135m",)})
    found = cases(suite)
    with pytest.raises(ConfigError, match=r"^case three: model: must be the same in all cases$"):
        model_of(list(found.values()))
    assert model_of(list(cases(suite_of("load")).values())).name == "random-8m"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduling.quantum=3", "scheduling.quantum"),
        ("schedulings=mlfq", "schedulings"),
        ("scheduling=mfq", "scheduling=mfq: no such choice; nearest: mlfq"),
        ("load=0", "load=0: must be a finite number > 0"),
        ("scheduling=s3", "scheduling=s3, prediction=none: needs predicted output lengths"),
    ],
)
def test_a_wrong_setting_is_reported_with_its_case(override, message):
    with pytest.raises(ConfigError) as error:
        cases(Suite(cases={"good": (), "bad": (override,)}))
    assert str(error.value).startswith(f"case bad: {message}")
    with pytest.raises(ConfigError) as error:
        cases(Suite(cases={"bad": (override,)}))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=l40s"], "hardware=l40s: device=cpu is measured; remove hardware="),
        (["suite=polices"], "suite=polices: no such choice; nearest: policies"),
        (["load=-1"], "load=-1: must be a finite number > 0"),
        (["repeats=0"], "repeats=0: must be >= 1"),
        (["calibrated=nowhere"], "calibrated=nowhere: no such folder"),
        (
            ["workload.branching.width=2", "workload.branching.every=1"],
            "workload.branching.every=1: the engine",
        ),
        (["replicas=2"], "replicas=2: only one engine is run"),
        (["model=gpt_oss_20b"], "model.weights=mxfp4: the engine supports"),
        (["caching=h2o"], "simulations only"),
        (["speculation=ngram", "speculation.num_speculative_tokens=129"], "must be 1 to 128"),
        (["speculation=medusa", "speculation.draft.num_layers=2"], "speculation.draft.num_layers=2: heads"),
        (["speculation=eagle", "speculation.draft.num_layers=2"], "speculation.draft.num_layers=2: must be"),
        (
            ["speculation=draft_model", "model@speculation.draft.model=smollm2_135m"],
            "speculation.draft.model=smollm2-135m: has 49,152 tokens in its vocabulary",
        ),
        (["suite=load", "caching=h2o"], "case load_30: caching=H2o"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(arguments, message, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(["validate", "device=cpu", f"hydra.run.dir={folder}", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "policies" else name for name in SUITES]
)
def test_every_case_can_be_built_and_run(name):
    """On the default machine, as `validate` builds them before it measures anything."""
    device = "cuda" if name.endswith("_gpu") else "cpu"
    found = cases(suite_of(name), device=device)
    assert list(found) == list(suite_of(name).cases)
    model_of(list(found.values()))
    for case in found.values():
        settings = settings_of(case.scenario, CPU, case.config)
        assert type(settings.batching) is type(case.scenario.batching)
        architecture_of(case.config["model"])


@pytest.fixture(scope="module")
def policies():
    """Builds the policies of configs/, by group and choice."""
    names = {group: [choice.name for choice in GROUPS[group]] for group in KINDS}
    built = {group: {} for group in KINDS}
    for row in zip_longest(*names.values()):
        chosen = [f"{group}={name}" for group, name in zip(KINDS, row, strict=True) if name is not None]
        cfg = SOURCE.compose(["device=cpu", "model=random_8m", *chosen])
        for group, name in zip(KINDS, row, strict=True):
            if name is not None:
                built[group][name] = build(OmegaConf.to_container(cfg, resolve=True)[group], group)
    return built


def why_not(group, policy):
    """Returns the reason for which the engine refuses to run a policy alone; "" if it runs it."""
    if not supports_mixed_role(policy):
        return "half of an engine"
    try:
        EngineSettings(**{group: policy})
    except ValueError as error:
        return str(error)
    return ""


def runnable_choices(group):
    """Returns the choices of a group in the cases of suite=policies, the default one included if used."""
    suite = suite_of("policies")
    default = SOURCE.compose(["device=cpu"], with_hydra=True).hydra.runtime.choices[group]
    chosen = set()
    for own in suite.cases.values():
        named = [one.partition("=")[2] for one in [*suite.base, *own] if one.startswith(f"{group}=")]
        chosen.add(named[-1] if named else default)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("group", KINDS)
def test_every_policy_that_the_engine_runs_has_a_case(group, policies):
    """A new file in configs/ needs a line in configs/suite/policies.yaml, or must say that it is not run."""
    runnable = {name for name, policy in policies[group].items() if not why_not(group, policy)}
    assert runnable == runnable_choices(group)


@pytest.mark.slow
def test_halves_of_an_engine_and_caches_that_forget_say_that_they_are_not_run(policies):
    for name in ("decode_only", "prefill_only"):
        assert why_not("batching", policies["batching"][name]) == "half of an engine"
    for name in ("fastgen", "h2o", "kv_groups"):
        assert "simulations only" in why_not("caching", policies["caching"][name])
    assert not any(why_not("scheduling", policy) for policy in policies["scheduling"].values())
