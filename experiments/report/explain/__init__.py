"""`windtunnel explain`: one request's life in a run."""
