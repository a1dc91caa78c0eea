"""The engine core with speculative decoding: sequences advance by several tokens in a step."""
