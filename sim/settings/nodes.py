"""Root keys of a config whose nodes are not built as the others are."""

NOT_OF_A_SCENARIO = ("hydra", "output", "launcher")
"""Root keys that do not belong to the scenario."""

OPTIONAL = ("slo", "prediction", "adapters", "tariff", "scaling", "speculation")
"""Groups with a choice `none` that is an empty node."""

ONLY_WITH_SPECULATION = ("draft_length", "acceptance")
"""Groups that are built only if a proposer drafts tokens."""
