"""Failing calls in `calibrate` and `validate`: one sentence, nothing torn, and the answer is printed.

The machine is measured once and the engine runs once; afterwards the harness repeats only what is read,
simulated and written. Which calls fail is drawn.
"""

from __future__ import annotations

import errno
import math
import os
from copy import deepcopy

import pytest

from experiments.app.cli import main
from tests.safety.faults import failing
from tests.safety.test_faults import calls_to_fail, check_files

pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments.calibrate.engine import pace, run
from experiments.calibrate.engine import settings as measure_settings
from experiments.validate.engine import on_engine

pytestmark = pytest.mark.slow

LIMITS = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "budget_s": 0.1}
TRAFFIC = ("workload.num_requests=4", "load=null", "repeats=1")
MACHINE = ("hardware=cpu", "engine=cpu", "latency=cpu_random_8m", "model=random_8m", "model.dtype=fp32")
DEVICE = ("validate", "device=cpu", *TRAFFIC)
RECORDED = ("validate", "--config-dir", "first/calibrated", "against=first/recordings/0", *MACHINE)
CALIBRATE = ("calibrate", "device=cpu", "model=random_8m", "out=out")


@pytest.fixture(scope="module")
def measured():
    """Replaces measurements and runs of the engine by the first one of each."""
    kept = {}

    def once(name, function):
        def call(settings, *given):
            if name not in kept:
                kept[name] = function(settings, *given)
            return deepcopy(kept[name])

        return call

    measure = once("machine", run.measure)

    def measured_into(settings, *given):
        found, files = measure(settings, *given), run._files(settings, settings.device)
        contents = dict(zip(files, map(dict(found.contents).get, found.files), strict=True))
        latency = run.latency_yaml("cpu", settings.model.name, files.table)
        return found._replace(files=files, contents=contents | {files.latency: latency})

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(measure_settings.LIMITS, "cpu", LIMITS)
        patch.setattr(pace, "MOST_VARIATION", math.inf)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.0)
        patch.setattr(run, "measure", measured_into)
        patch.setattr(on_engine, "measure", measured_into)
        patch.setattr(on_engine, "run_on_engine", once("engine", on_engine.run_on_engine))
        yield


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def given(words):
    """Returns the command with the folder of its run, `out`."""
    return list(words) if words[0] == "calibrate" else [*words, "hydra.run.dir=out", "overwrite=true"]


@pytest.mark.parametrize("words", [CALIBRATE, DEVICE, RECORDED], ids=["calibrate", "device", "against"])
def test_each_failing_call_is_reported_and_nothing_is_torn(words, measured, tmp_path, capsys, request):
    if words is RECORDED:
        assert main([*DEVICE, "hydra.run.dir=first", "output.report=false"]) == 0
    kinds = set()
    for fails_at in calls_to_fail(given(words), tmp_path, request):
        capsys.readouterr()
        with failing(tmp_path, fails_at) as faults:
            code = main(given(words))
        error = capsys.readouterr().err
        check_files(tmp_path)
        if faults.failed:  # a folder of an earlier try is not made again
            where = f"call {fails_at}, {faults.failed}: {error}"
            assert code == 1, where
            assert error.count("\n") == 1, where
            assert "No space left on device" in error, where
            kinds.add(faults.failed.partition(" ")[0])
    assert len(kinds) >= 3
    assert main(given(words)) == 0
    check_files(tmp_path)


@pytest.mark.parametrize(
    ("words", "module"),
    [(CALIBRATE, "experiments.calibrate.engine.run"), (DEVICE, "experiments.validate.engine.recording")],
    ids=["calibrate", "device"],
)
def test_an_answer_is_printed_before_a_full_disk_ends_the_command(
    words, module, measured, monkeypatch, capsys
):
    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    if words is DEVICE:
        main(given(CALIBRATE))
        words = [*words, "calibrated=out", "model=random_8m"]
    monkeypatch.setattr(f"{module}.write_whole", full)
    assert main([*words, *([] if words is CALIBRATE else ["hydra.run.dir=run"])]) == 1
    said = capsys.readouterr()
    assert "No space left on device" in said.err
    assert len(said.out.splitlines()) > 10
