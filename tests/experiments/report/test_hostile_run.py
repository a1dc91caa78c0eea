"""A run's folder may hold pipes, devices, folders and bombs in place of its files; all are refused."""

import json
import os
import time

import numpy as np
import pandas as pd
import pytest

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.report.run_files import read_summary, read_table
from experiments.validate.engine import recording
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object

READERS = {
    "config.yaml": read_yaml,
    "records.json": read_json_object,
    "summary.json": lambda file: read_summary(file.parent),
    "requests.parquet": lambda file: read_table(file.parent, file.name),
}


def replaced(folder, name, kind):
    file = folder / name
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero")
    return file


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    file = replaced(tmp_path, name, kind)
    begun = time.monotonic()
    with pytest.raises(ConfigError) as error:
        READERS[name](file)
    assert time.monotonic() - begun < 2
    assert name in str(error.value)
    assert ("folder" if kind == "folder" else "must be a regular file") in str(error.value)


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["recording.json", "steps.parquet"])
def test_a_recording_is_read_from_regular_files_only(tmp_path, name, kind):
    (tmp_path / "recording.json").write_text(json.dumps({"engine": {}, "num_events": 0, "num_steps": 0}))
    (tmp_path / name).unlink(missing_ok=True)
    replaced(tmp_path, name, kind)
    with pytest.raises(ValueError, match="must be a regular file"):
        recording.load(tmp_path)


def test_a_table_that_expands_is_refused_by_its_footer(tmp_path):
    rows = pd.DataFrame({name: np.zeros(5_000_000) for name in "abcdefghij"})
    rows.to_parquet(tmp_path / "requests.parquet")
    with pytest.raises(ConfigError, match=r"requests.parquet: its 5,000,000 rows of 10 columns would take"):
        read_table(tmp_path, "requests.parquet")
