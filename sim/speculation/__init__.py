"""Speculative decoding in the simulator: which draft tokens are accepted."""
