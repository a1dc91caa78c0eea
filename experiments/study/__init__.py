"""What studies of many runs share: overrides, variants, workers, launchers, verdicts."""
