"""Records of a run as columns: requests, iterations, gaps and events."""
