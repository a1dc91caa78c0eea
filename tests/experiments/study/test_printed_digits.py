"""Digits of printed figures: no more than their intervals support, in all studies."""

import re
from pathlib import Path

import pytest

from experiments.app.cli import main

SMALL = ("model=smollm2_135m", "hardware=l4", "workload=poisson", "workload.num_requests=150")
ARMS = "['one: replicas=1','two: replicas=2']"
COMMANDS = {
    "simulate": ["simulate", *SMALL[:3], "workload.num_requests=1500", "output.report=true"],
    "compare": ["compare", f"compare.arms={ARMS}", "compare.seeds=[0,1,2]", "compare.jobs=1", *SMALL],
    "whatif": [
        *("whatif", "whatif.changes=['two: replicas=2','few: engine.max_num_seqs=4']", "whatif.jobs=1"),
        *("whatif.seeds=[0,1,2]", *SMALL),
    ],
    "goodput": [
        *("goodput", f"goodput.arms={ARMS}", "goodput.seeds=[0,1]", "goodput.jobs=1", *SMALL),
        *("engine.max_num_seqs=4", "goodput.rates=[4,400]", "goodput.requests=60", "goodput.precision=0.5"),
    ],
    "capacity": [
        *("capacity", "capacity.jobs=1", "capacity.hardware=[l4]", "capacity.tensor_parallel_sizes=[1]"),
        *("capacity.window_s=null", "capacity.seeds=[0,1]", "capacity.quantisations=[null]", *SMALL),
    ],
    "sweep": ["sweep", "seed=0,1,2", "replicas=1,2", "launcher.jobs=1", *SMALL],
    "spares": ["spares", "needed=2", "most_spares=2", "replications=2000"],
}
VALUE = r"[-+−×]?[0-9][0-9,]*(?:\.[0-9]+)?"
PLUS_MINUS = re.compile(rf"({VALUE}) ±\s?({VALUE})(?! ?%)")
BOUNDS = re.compile(rf"({VALUE}) ?%? \(95 % interval ({VALUE}) to ({VALUE})")


def decimals(text):
    """Returns the decimals of a number, negative for tens, hundreds, ... that end in zeros."""
    digits = text.lstrip("-+−×").replace(",", "")
    if "." in digits:
        return len(digits.partition(".")[2])
    return -(len(digits) - len(digits.rstrip("0"))) if digits.strip("0") else 0


def amount(text):
    return float(text.replace(",", "").replace("−", "-").lstrip("+×"))


def check(printed):
    """Checks all intervals of a text; returns how many there are."""
    found = PLUS_MINUS.findall(printed)
    for mean, half in found:
        significant = half.replace(",", "").replace(".", "").strip("0")
        assert len(significant) <= 2, (mean, half)
        assert len(significant) < 2 or significant[0] in "12", (mean, half)
        # The mean has no digit below the last of its half width.
        assert decimals(mean) <= max(decimals(half), 0), (mean, half)
    bounds = BOUNDS.findall(printed)
    for mean, low, high in bounds:
        assert amount(low) <= amount(mean) <= amount(high), (mean, low, high)
        half = max(amount(high) - amount(mean), amount(mean) - amount(low))
        unit = 10.0 ** -max(map(decimals, (mean, low, high)))
        assert half / unit < 32, (mean, low, high)
    return len(found) + len(bounds)


@pytest.mark.sampled(fast=1, slow=6)
@pytest.mark.parametrize("name", COMMANDS)
def test_figures_have_the_digits_that_their_intervals_support(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    assert main([*COMMANDS[name], "hydra.run.dir=out"]) in (0, 3)
    printed = capsys.readouterr().out
    number = check(printed)
    pages = [path.read_text() for path in Path("out").rglob("*.html")] if Path("out").exists() else []
    for page in pages:
        check(re.sub(r"<[^>]*>", " ", re.sub(r"<script.*?</script>", " ", page, flags=re.DOTALL)))
    if name == "simulate":
        [line] = [line for line in printed.splitlines() if "confidence (single run)" in line]
        for half in re.findall(rf"± ({VALUE}) (?:%|points)", line):
            assert len(half.replace(".", "").strip("0")) <= 2, line
    elif name not in ("sweep", "spares"):
        assert number


@pytest.mark.parametrize(
    "text", ["79.2 ± 265", "35.23 ± 3.9", "1,234 ± 77", "35.23 ± 4", "2.75 (95 % interval 1.00 to 5.00"]
)
def test_false_precision_is_found(text):
    with pytest.raises(AssertionError):
        check(text)
