"""The metrics of a server, with the names and meanings of vLLM's."""
