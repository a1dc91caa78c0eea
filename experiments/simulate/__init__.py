"""Commands that run one workload once: windtunnel simulate and windtunnel chat."""
