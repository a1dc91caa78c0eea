"""Tables are read within limits, and damage is reported."""

import gzip
from pathlib import Path

import pandas as pd
import pytest

from hwmodels.levels import table_files
from hwmodels.levels.table_files import read_table_file

TABLE = pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_tables_are_read_by_their_suffix(name, tmp_path):
    file = tmp_path / name
    TABLE.to_parquet(file) if name.endswith("parquet") else TABLE.to_csv(file, index=False)
    pd.testing.assert_frame_equal(read_table_file(file), TABLE)


@pytest.mark.parametrize(
    "text",
    [b"x" * (2 << 20), b"a,b\n" + b"1," * (1 << 20), b"a\n" + b"1" * 70_000 + b"\n" + b"2" * (1 << 20)],
)
@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_a_long_line_is_refused(name, text, tmp_path):
    file = tmp_path / name
    file.write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    with pytest.raises(ValueError, match="and less than 1,048,576 in a line"):
        read_table_file(file)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_a_large_table_is_refused(name, tmp_path, monkeypatch):
    file = tmp_path / name
    TABLE.to_parquet(file) if name.endswith("parquet") else TABLE.to_csv(file, index=False)
    monkeypatch.setattr(table_files, "MAX_BYTES", 10)
    monkeypatch.setenv("WINDTUNNEL_MAX_TABLE_BYTES", "10")
    with pytest.raises(ValueError, match=r"must have at most 10 bytes|may take 10; set the environment"):
        read_table_file(file)


@pytest.mark.parametrize("cut", [5, 20])
def test_cut_gzip_data_are_damaged(cut, tmp_path):
    file = tmp_path / "t.csv.gz"
    file.write_bytes(gzip.compress(b"a,b\n1,2\n")[:-cut])
    with pytest.raises(ValueError, match="the gzip data are damaged"):
        read_table_file(file)


def test_a_device_is_no_table():
    with pytest.raises(ValueError, match="must be a regular file"):
        read_table_file(Path("/dev/zero"))
