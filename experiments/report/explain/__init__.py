"""`windtunnel explain`: the phases of one request of a run."""
