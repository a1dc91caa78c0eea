"""`windtunnel validate against=` reads runs that have streamed their tables."""

import pandas as pd
import pytest

from experiments.validate.foreign.read import read_runs
from sim import simulate


@pytest.mark.parametrize("iterations", [False, True])
def test_the_folder_of_a_run_and_that_of_its_requests_are_read(tmp_path, iterations):
    run = tmp_path / "run"
    settings = {"workload": "poisson", "workload__num_requests": 40, "replicas": 2}
    result = simulate(stream_to=run, iterations=iterations, **settings)
    rows = pd.read_parquet(run / "requests.parquet")
    for path in (run, run / "requests.parquet"):
        (measured,) = read_runs(path).values()
        assert measured.requests["output_tokens"].sum() == rows["output_tokens"].sum()
        assert (measured.iterations is not None) == iterations
        assert measured.num_kv_blocks == result.summary["memory"]["num_blocks"]
