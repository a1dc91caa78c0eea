"""Conformance suite: checks in random worlds that a policy keeps the promises of its family."""
