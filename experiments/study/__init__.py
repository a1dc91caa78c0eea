"""What studies of many runs share: seeds, runs, workers, launchers, verdicts."""
