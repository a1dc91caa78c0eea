"""The command `score` on a table of given rows."""

import pandas as pd
import pytest

from experiments.app.cli import main


@pytest.fixture
def score(tmp_path, monkeypatch, capsys):
    """Returns score(rows, **settings): exit code, predictions by id or None if none were written, output."""

    def run(rows, *arguments, **settings):
        monkeypatch.chdir(tmp_path)
        pd.DataFrame(rows).to_csv("measured.csv", index=False)
        given = {"measured": "measured.csv", "out": "predicted.csv", "jobs": 1, **settings}
        code = main(["score", *(f"{name}={value}" for name, value in given.items()), *arguments])
        said = capsys.readouterr()
        out = tmp_path / "predicted.csv"
        return code, pd.read_csv(out).set_index("id") if out.exists() else None, said.out + said.err

    return run
