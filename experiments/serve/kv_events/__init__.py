"""KV events over ZMQ, in the format of vLLM."""
