"""Numbers of examples of expensive property tests: few in `make test`, and many in the other profiles."""

import os
from typing import Any

from hypothesis import settings

IS_FAST = os.environ.get("HYPOTHESIS_PROFILE", "same") == "same"


def examples(few: int, many: int, **more: Any) -> settings:
    """Returns settings with `few` examples in `make test`, and `many` in other profiles."""
    return settings(max_examples=few if IS_FAST else many, **more)
