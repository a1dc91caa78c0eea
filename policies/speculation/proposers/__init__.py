"""Proposers: they draft the tokens that a pass verifies. One proposer per file."""
