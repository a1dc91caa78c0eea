"""A user's policy that fails ends every command with one sentence and the user's own line, and code 2."""

import re
import shutil
import sys
from functools import lru_cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.api import simulate
from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import config_dirs, with_choice
from experiments.app.settings.hydra_errors import composed
from experiments.conformance.claims import BrokenPromise, claims_of
from policies.user_code import PolicyError, quote_of
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run

SMALL = ("workload.num_requests=8", "model=smollm2_135m", "hardware=l4")
FOLDER = ("output.report=false", "hydra.run.dir=out", "overwrite=true")
CHOICES = {
    "batching": ("BadBatching", "WrongSignature", "NoMethod", "FailsWhenMade", "NoPolicy"),
    "scheduling": ("BadScheduling", "NoRank"),
    "caching": ("BadCaching", "NoPool"),
    "routing": ("BadRouting", "BadEnd"),
    "admission": ("BadAdmission",),
    "scaling": ("BadScaling",),
    "prediction": ("BadPrediction",),
    "adapters": ("BadAdapters",),
    "draft_length": ("BadDraftLength",),
}
AT = r"at [\d.e+-]+ s( in iteration \d+)?( of replica \d+)?, "
FAILURES = [
    (
        "batching",
        "BadBatching",
        "raises",
        f"{AT}fill raised ZeroDivisionError: division by zero; a policy must",
        r"helper\n    return 1 / value",
    ),
    (
        "batching",
        "BadBatching",
        "wrong verb",
        f"{AT}fill used step.decode_everything, which does not exist; "
        "nearest: decode, decode_all; see docs/policies.md",
        r"fill\n    step.decode_everything\(\)",
    ),
    (
        "batching",
        "BadBatching",
        "wrong argument",
        f"{AT}fill called step.decode with a wrong argument .*; it takes "
        r"\(seq\)",
        r"fill\n    step.decode\(7\)",
    ),
    (
        "batching",
        "BadBatching",
        "wrong sequence",
        f"{AT}fill called step.decode, which refused the call: Sequence",
        r"fill\n    step.decode\(next",
    ),
    (
        "batching",
        "BadBatching",
        "wrong attribute",
        f"{AT}fill used .*num_tokenz, which does not exist; nearest: ",
        r"fill\n    next\(iter",
    ),
    (
        "batching",
        "BadBatching",
        "exits",
        f"{AT}fill called sys.exit; a policy must return",
        r"fill\n    sys.exit",
    ),
    (
        "batching",
        "BadBatching",
        "nothing",
        f"{AT}fill scheduled nothing with 1 waiting and 0 running; it must",
        r"fill\n    def fill",
    ),
    ("batching", "BadBatching", "waits", f"{AT}fill waits for ever with 8 waiting", r"fill\n    def fill"),
    (
        "batching",
        "BadBatching",
        "polls",
        f"{AT}fill has called step.wait_until 10,000 times in a",
        r"fill\n    def fill",
    ),
    (
        "batching",
        "WrongSignature",
        "",
        r"has fill\(view, step\), which must be fill\(view, step, now\)",
        r"fill\n    def fill\(self, view, step\):",
    ),
    ("batching", "NoMethod", "", r"has no fill\(...\); a Batching is needed", r"\d\n    class NoMethod:"),
    ("batching", "NoPolicy", "", r"has no fill\(...\); a Batching is needed", r"\d\n    class NoPolicy:"),
    (
        "batching",
        "FailsWhenMade",
        "",
        "__post_init__ raised TypeError: ",
        r"__post_init__\n    self.max_num",
    ),
    (
        "scheduling",
        "BadScheduling",
        "raises",
        f"{AT}before_step raised LookupError: lost",
        r"raise LookupError",
    ),
    ("scheduling", "BadScheduling", "none", f"{AT}rank returned None; it must return a tuple", r"def rank"),
    ("scheduling", "BadScheduling", "text", rf"{AT}rank returned \('a',\); it must return", r"def rank"),
    (
        "scheduling",
        "BadScheduling",
        "not a number",
        rf"{AT}rank returned \(nan,\); it must",
        r"def rank",
    ),
    ("scheduling", "BadScheduling", "end", f"{AT}on_end raised ZeroDivisionError", r"helper\n    return 1"),
    ("scheduling", "NoRank", "", r"has no rank\(...\); a Scheduling is needed", r"\d\n    class NoRank"),
    ("caching", "BadCaching", "raises", "pool raised IndexError: list index", r"pool\n    return \[\]\[1\]"),
    (
        "caching",
        "BadCaching",
        "none",
        "pool returned None; it must return a policies.caching.pool.BlockPool",
        r"def pool",
    ),
    ("caching", "NoPool", "", r"has no pool\(...\); a Caching is needed", r"\d\n    class NoPool"),
    ("routing", "BadRouting", "raises", f"{AT}choose raised KeyError: 'raises'", r"choose\n    return {"),
    ("routing", "BadRouting", "unknown", f"{AT}choose returned 7; it must return a position", r"def choose"),
    ("routing", "BadRouting", "none", f"{AT}choose returned None; it must return a position", r"def choose"),
    ("routing", "BadRouting", "text", f"{AT}choose returned 'a'; it must return a position", r"def choose"),
    ("routing", "BadRouting", "half", f"{AT}choose returned 0.5; it must return a position", r"def choose"),
    (
        "routing",
        "BadEnd",
        "",
        rf"{AT}on_end does not take its arguments \(BadEnd.on_end\(\) takes 2",
        r"def on_end",
    ),
    ("admission", "BadAdmission", "raises", f"{AT}refusal raised ZeroDivisionError", r"helper\n    return 1"),
    ("admission", "BadAdmission", "text", f"{AT}refusal returned 'no'; it must return None", r"def refusal"),
    ("scaling", "BadScaling", "raises", f"{AT}target raised KeyError", r"target\n    return {"),
    (
        "scaling",
        "BadScaling",
        "many",
        f"{AT}target returned 99; it must return a whole number from min_replicas=1 to max_replicas=4",
        r"def target",
    ),
    ("scaling", "BadScaling", "half", f"{AT}target returned 1.5; it must return a whole", r"def target"),
    ("scaling", "BadScaling", "none", f"{AT}target returned None; it must return a whole", r"def target"),
    ("prediction", "BadPrediction", "raises", f"{AT}predict raised KeyError", r"predict\n    return {"),
    (
        "prediction",
        "BadPrediction",
        "none",
        f"{AT}predict returned None; it must return a whole",
        r"def predict",
    ),
    (
        "prediction",
        "BadPrediction",
        "zero",
        f"{AT}predict returned 0; it must return a whole",
        r"def predict",
    ),
    ("adapters", "BadAdapters", "raises", "residents raised ZeroDivisionError", r"helper\n    return 1"),
    (
        "adapters",
        "BadAdapters",
        "none",
        "residents returned None; it must return a policies",
        r"def residents",
    ),
    ("draft_length", "BadDraftLength", "raises", f"{AT}num_draft_tokens raised KeyError", r"return {"),
    *(
        (
            "draft_length",
            "BadDraftLength",
            way,
            f"{AT}num_draft_tokens returned {shown}; it must return a whole number from 0 to 4, or an array",
            r"def num_draft_tokens",
        )
        for way, shown in (
            ("none", "None"),
            ("negative", "-1"),
            ("half", "0.5"),
            ("many", "5"),
            ("list", r"\[1, 1\]"),
        )
    ),
]
MORE = {
    "prediction": [*SMALL, "scheduling=shortest_job_first"],
    "adapters": ["workload=lora", "workload.of.num_requests=8"],
    "draft_length": [*SMALL, "speculation=ngram"],
}
"""Runs in which a family's policy matters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a user's folder with bad policies and a choice for each, named unlike its class."""
    sys.modules.pop("bad_policies", None)  # of an earlier folder, if tests of other modules came between
    made = tmp_path_factory.mktemp("user")
    shutil.copy(Path(__file__).with_name("bad_policies.py"), made)
    for family, classes in CHOICES.items():
        (made / "mine" / family).mkdir(parents=True)
        for name in classes:
            way = "" if name.startswith(("No", "Wrong", "Fails", "BadEnd")) else "way: raises\n"
            text = f"_target_: bad_policies.{name}\n{way}"
            (made / "mine" / family / f"my_{name.lower()}.yaml").write_text(text)
    (made / "broken.py").write_text("import os\n\n\ndef fill(:\n    pass\n")
    (made / "raising.py").write_text("import os\n\nos.nothing_there\n")
    return made


@pytest.fixture(autouse=True)
def _here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])


@lru_cache
def config_of(family):
    """Returns the config of a short run in which the policy of a family matters."""
    source = ConfigSource(config_name="simulate", dirs=config_dirs(None))
    return OmegaConf.to_container(composed(source, MORE.get(family, list(SMALL))), resolve=True)


def failed(capsys, *words):
    """Runs a command, which must exit with code 2, and returns what it says."""
    assert main([*words, "--config-dir", "mine"]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "name", "way", "sentence", "quote"), FAILURES, ids=[" ".join(row[1:3]) for row in FAILURES]
)
def test_every_failure_is_one_sentence_and_the_user_s_line(family, name, way, sentence, quote):
    choice = f"{family}=my_{name.lower()}"
    config = config_of(family) | {
        family: {"_target_": f"bad_policies.{name}"} | ({"way": way} if way else {})
    }
    with pytest.raises(ConfigError) as raised:
        run(*build_run(config))
    said, where = str(with_choice(raised.value, [Path("mine")])), quote_of(raised.value)
    assert re.match(rf"{choice} \(bad_policies\.{name}\): {sentence}", said), said
    assert re.match(r"  bad_policies\.py:\d+", where)
    assert re.search(quote, where), where
    assert "\n" not in said
    assert where.count("\n") == 1


@pytest.mark.parametrize(
    ("target", "sentence", "quote"),
    [
        (
            "broken.Mine",
            "importing broken failed: SyntaxError: invalid syntax",
            "broken.py:4\n    def fill(:",
        ),
        ("raising.Mine", "AttributeError: module 'os' has no", "raising.py:3\n    os.nothing_there"),
        ("absent.Mine", "no module absent; install it, run in its folder", ""),
        ("bad_policies.Mine", "module bad_policies has no Mine; ", ""),
    ],
)
def test_a_policy_that_cannot_be_imported_is_named(target, sentence, quote, capsys):
    said = failed(capsys, "simulate", *SMALL, *FOLDER, "batching=my_nomethod", f"batching._target_={target}")
    assert said.startswith(f"windtunnel: batching._target_={target}: ")
    assert sentence in said
    assert said.rstrip().endswith(quote)
    assert "Traceback" not in said


def test_a_choice_without_a_class_is_named(folder, capsys):
    (folder / "mine" / "batching" / "empty.yaml").write_text("max_num_batched_tokens: 3\n")
    assert "must be a Batching: a mapping with a _target_ that names the class" in failed(
        capsys, "simulate", *SMALL, *FOLDER, "batching=empty"
    )


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_whole_trace_is_printed_if_it_is_asked_for(place, capsys):
    words = ["simulate", *SMALL, *FOLDER, "batching=my_badbatching"]
    words.insert(0 if place == "before" else len(words), "--traceback")
    said = failed(capsys, *words)
    assert said.startswith("Traceback (most recent call last):\n")
    assert "ZeroDivisionError: division by zero\nwindtunnel: batching=my_badbatching" in said
    assert said.endswith("    return 1 / value\n")


COMMANDS = {
    "multirun": [
        "simulate",
        "--multirun",
        *SMALL,
        "batching=chunked,my_badbatching",
        "hydra.sweep.dir=out_m",
    ],
    "compare": [
        "compare",
        "also=['scheduling=my_badscheduling','workload.num_requests=8']",
        "experiment.seeds=[0,1]",
        "jobs=2",
    ],
    "goodput": ["goodput", *SMALL, "batching=my_badbatching"],
    "capacity": ["capacity", *SMALL, "batching=my_badbatching", "capacity.jobs=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_it_also_from_other_processes(command, capsys):
    more = [] if command == "multirun" else ["hydra.run.dir=out_c", "overwrite=true"]
    said = failed(capsys, *COMMANDS[command], *more).splitlines()[-3:]
    assert re.search(
        r"(batching|scheduling)=my_bad\w+ \(bad_policies\.Bad\w+\): at .* raised (Zero|Lookup)", said[0]
    )
    assert re.fullmatch(r"  bad_policies.py:\d+, in (helper|before_step)", said[1])
    assert said[2] in ("    return 1 / value", '    raise LookupError("lost")')


@pytest.mark.slow
def test_a_sweep_keeps_the_other_runs_and_the_trace(capsys):
    words = ["sweep", "batching=chunked,my_badbatching", *SMALL, "hydra.run.dir=out_s", "launcher.jobs=2"]
    assert main([*words, "--config-dir", "mine"]) == 3
    out = capsys.readouterr().out
    assert "batching=my_badbatching (bad_policies.BadBatching): at " in out
    assert "(bad_policies.py:16, in helper return 1 / value)" in out
    (trace,) = Path("out_s").glob("*/error.txt")
    assert "ZeroDivisionError" in trace.read_text()


@pytest.mark.slow
def test_the_conformance_suite_says_it_below_the_world(folder):
    from bad_policies import BadBatching  # noqa: PLC0415

    claim = claims_of(BadBatching(way="raises"))[0]
    with pytest.raises(BrokenPromise, match=r"(?s)Broken in this world:.*batching=bad_batching ") as raised:
        claim.check(1)
    said = str(raised.value)
    assert said.endswith("  bad_policies.py:16, in helper\n    return 1 / value")
    assert raised.value.__cause__ is None


def test_the_python_interface_raises_it_with_the_line_as_a_note():
    from bad_policies import BadRouting  # noqa: PLC0415

    with pytest.raises(PolicyError, match=r"^routing=bad_routing \(bad_policies.BadRouting\): ") as raised:
        simulate(*SMALL, routing=BadRouting(way="unknown"))
    assert "bad_policies.py:" in raised.value.__notes__[0]
