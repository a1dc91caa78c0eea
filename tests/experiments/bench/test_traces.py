"""The benchmark of traces writes files that its formats read."""

import pytest

from experiments.bench import session_traces
from experiments.bench.traces import FORMATS, files, main, measure


@pytest.mark.parametrize(("formats", "num_files"), [(FORMATS, 8), (session_traces.FORMATS, 3)])
def test_every_file_is_read_whole(tmp_path, formats, num_files):
    measured = {}
    for path in files(tmp_path, 300, formats):
        measured[path.name] = measure(path, formats)
    assert len(measured) == num_files
    assert all(check_us > 0 and read_us > 0 for _, check_us, read_us in measured.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_prints_a_line_for_each_file(capsys):
    main([200])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["rows", *["200"] * 8]
    main([200], session_traces.FORMATS, "experiments.bench.session_traces")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["rows", *["200"] * 3]
