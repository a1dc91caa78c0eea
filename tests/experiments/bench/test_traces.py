"""The benchmark of traces writes files that its formats read."""

import pytest

from experiments.bench.traces import files, main, measure


def test_every_file_is_read_whole(tmp_path):
    measured = {}
    for path in files(tmp_path, 300):
        measured[path.name] = measure(path)
    assert len(measured) == 8
    assert all(check_us > 0 and read_us > 0 for _, check_us, read_us in measured.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_prints_a_line_for_each_file(capsys):
    main([200])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["rows", *["200"] * 8]
