"""Records what a run did as columns: requests, iterations, gaps and events."""
