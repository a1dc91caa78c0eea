"""Files that a user names are regular and bounded, or refused before they are read."""

import os

import pandas as pd
import pytest

from hwmodels.checks import (
    UnreadableFileError,
    check_table,
    open_regular,
    read_bytes,
    read_text,
)
from hwmodels.levels.table_files import read_parquet


def test_reads_regular_files_and_links_to_them(tmp_path):
    (tmp_path / "a").write_bytes(b"one\r\ntwo\rthree")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert read_bytes(tmp_path / "b") == b"one\r\ntwo\rthree"
    assert read_text(tmp_path / "b") == "one\ntwo\nthree"


def test_refuses_pipes_devices_and_folders_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(UnreadableFileError, match="must be a regular file, not a pipe, socket or device"):
            open_regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "none")


def test_refuses_files_above_the_limit(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnreadableFileError, match="at most 1,073,741,824 bytes, has 1,099,511,627,776"):
        read_bytes(tmp_path / "sparse")
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(UnreadableFileError, match="at most 4 bytes"):
        read_bytes(tmp_path / "a", 4)


def test_tables_are_bounded_by_their_footers(tmp_path, monkeypatch):
    pd.DataFrame({"a": [7] * 200_000, "b": [[1, 2, 3]] * 200_000}).to_parquet(tmp_path / "t.parquet")
    assert len(read_parquet(tmp_path / "t.parquet")) == 200_000
    monkeypatch.setenv("WINDTUNNEL_MAX_TABLE_BYTES", "6399999")
    with pytest.raises(UnreadableFileError, match="200,000 rows of 2 columns would take 6,400,000 bytes"):
        read_parquet(tmp_path / "t.parquet")  # 200,000 x (1 + 3) values of 8 bytes
    monkeypatch.setenv("WINDTUNNEL_MAX_TABLE_BYTES", "6400000")
    check_table(tmp_path / "t.parquet")


def test_a_folder_of_tables_has_at_least_one(tmp_path):
    with pytest.raises(UnreadableFileError, match="folder without Parquet files"):
        read_parquet(tmp_path)
    pd.DataFrame({"a": [7]}).to_parquet(tmp_path / "part-0.parquet")
    assert read_parquet(tmp_path)["a"].tolist() == [7]
