"""Token counts of texts in traces: by a tokenizer of the user, or 4 characters per token."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from sim.workload.trace_files import require_file, require_size

CHARACTERS_PER_TOKEN = 4
"""English text has some 4 characters per token of the vocabularies in use; code and other languages fewer."""
MAX_TOKENIZER_BYTES = 1 << 28


class TextLengths:
    """Counts the tokens of texts.

    path: a tokenizer.json, or the folder that holds one; None: 4 characters per token.
    """

    def __init__(self, path: Path | None) -> None:
        """Reads the tokenizer. Raises ValueError."""
        self._tokenizer: Any = None
        if path is None:
            self.remark = (
                f"Lengths are those of texts at {CHARACTERS_PER_TOKEN} characters per token; "
                "workload.tokenizer=FILE counts them with a tokenizer.json."
            )
            return
        file = path / "tokenizer.json" if path.is_dir() else path
        require_file(file, "tokenizer")
        require_size(file, MAX_TOKENIZER_BYTES, "tokenizer")
        try:
            package = importlib.import_module("tokenizers")  # a compiled package that only such traces need
        except ImportError:
            raise ValueError(
                f"tokenizer={path}: needs the package tokenizers: pip install tokenizers"
            ) from None
        try:
            self._tokenizer = package.Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises no class of its own
            raise ValueError(f"tokenizer={path}: is no tokenizer.json: {error}") from None
        self.remark = f"Lengths are those of texts, counted with {file}."

    def __call__(self, text: str) -> int:
        """Returns the number of tokens of a text, at least 1."""
        if self._tokenizer is None:
            return max(1, -(-len(text) // CHARACTERS_PER_TOKEN))
        return max(1, len(self._tokenizer.encode(text, add_special_tokens=False).ids))
