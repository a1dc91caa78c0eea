"""The settings of every way to draft, for a target of two layers."""

from realengine.model.architecture import Architecture
from tests.realengine.small_models import CONFIGS
from tests.realengine.speculation.test_lossless import NGRAM

LIKE_TARGET = Architecture.from_hf(CONFIGS["llama"])
SMALLER = Architecture.from_hf(CONFIGS["llama"] | {"num_hidden_layers": 1})
TREE_CONFIG = {"speculative_token_tree": [(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]}
DRAFTERS = {
    "ngram": NGRAM,
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": LIKE_TARGET, "num_speculative_tokens": 3},
    "smaller": {"method": "draft_model", "model": SMALLER, "num_speculative_tokens": 3},
    "self": {"method": "self_speculative", "skipped_layers": [1], "num_speculative_tokens": 2},
    "lookahead": {"method": "lookahead", "window": 3, "ngram": 3, "guesses": 3},
    "specinfer": {"method": "specinfer_tree", "model": LIKE_TARGET, "widths": [2, 1]},
    "medusa": {"method": "medusa", "model": LIKE_TARGET, "num_speculative_tokens": 3},
    "medusa_tree": {"method": "medusa", "model": LIKE_TARGET, **TREE_CONFIG},
    "eagle": {"method": "eagle", "model": SMALLER, "num_speculative_tokens": 3},
    "eagle_tree": {"method": "eagle", "model": SMALLER, **TREE_CONFIG},
    "mtp": {"method": "mtp", "model": LIKE_TARGET, "num_speculative_tokens": 2},
    "eagle3": {"method": "eagle3", "model": SMALLER, "num_speculative_tokens": 3},
}
