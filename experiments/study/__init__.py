"""Parts that studies of many runs share: seeds, runs, workers, launchers, verdicts."""
