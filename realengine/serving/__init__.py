"""Interfaces that users of the engine call: offline, asynchronous, tokenizer and sampling parameters."""
