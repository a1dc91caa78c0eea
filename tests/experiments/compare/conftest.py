"""A folder with a user's own experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.experiments.compare.own_experiment import prepare


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    prepare(tmp_path, monkeypatch)
    return tmp_path
