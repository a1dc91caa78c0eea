"""The expected length of an answer, corrected once the answer has exceeded its prediction."""

from __future__ import annotations

from policies.core.sequence_view import SequenceView


def expected_output_tokens(seq: SequenceView) -> int:
    """The predicted output tokens, doubled until they exceed those produced so far.

    This is S3's correction (Jin et al., NeurIPS 2023). Predicted 10: 10 up to the 9th token, 20 from the 10th
    on.
    """
    expected, num_produced = seq.num_predicted_tokens, seq.num_output_tokens
    while expected <= num_produced:
        expected *= 2
    return expected


def remaining_output_tokens(seq: SequenceView) -> int:
    """Output tokens still expected, >= 1; the expectation does not change for that many iterations."""
    return expected_output_tokens(seq) - seq.num_output_tokens
