"""Computes the expected output length of a sequence, corrected when its prediction is exceeded."""

from __future__ import annotations

from policies.core.sequence import SequenceView


def expected_output_tokens(seq: SequenceView) -> int:
    """Computes the predicted output tokens, doubled until they exceed the output tokens so far.

    This is S3's correction (Jin et al., NeurIPS 2023). Example: a prediction of 10 counts as 10 up to the 9th
    token and as 20 from the 10th on.
    """
    expected, num_produced = seq.num_predicted_tokens, seq.num_output_tokens
    while expected <= num_produced:
        expected *= 2
    return expected


def remaining_output_tokens(seq: SequenceView) -> int:
    """Computes the expected remaining output tokens, >= 1; the expectation holds for that many iterations."""
    return expected_output_tokens(seq) - seq.num_output_tokens
