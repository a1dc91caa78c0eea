"""Settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, check
from realengine.model.architecture import Architecture

METHODS = ("medusa", "eagle")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings(Checked):
    """Settings of a training run. Raises ValueError in the form name=value: rule."""

    out: Path
    """Folder that gets one folder per method; it must be new or empty."""
    model: str | Path | Architecture = "smollm2"
    """The target, as `realengine.serving.llm.LLM` takes it."""
    methods: tuple[str, ...] = METHODS
    num_heads: int = 3
    """Number of Medusa heads."""
    num_drafts: tuple[int, ...] = (1, 3)
    """Numbers of draft tokens that are measured."""
    num_prompts: int = 320
    """Number of prompts whose answers are the training text."""
    num_held_out: int = 12
    """Number of prompts of the measurement, of which none is trained on."""
    num_tokens: int = 128
    """Most tokens of an answer that is trained on."""
    num_measured_tokens: int = 64
    """Most tokens of an answer of the measurement."""
    temperature: Annotated[NonNegative, "0 is greedy"] = 0.0
    """Temperature of the training text."""
    epochs: int = 6
    learning_rate: Positive = 1e-3
    threads: int = 1
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(f"method={name}: must be one of {', '.join(METHODS)}")
        counts = ("num_heads", "num_prompts", "num_held_out", "num_tokens", "num_measured_tokens")
        for name in (*counts, "epochs", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be >= 1")
        for num_drafts in self.num_drafts:
            if num_drafts < 1:
                raise ValueError(f"num_drafts={num_drafts}: must be >= 1")
            if "medusa" in self.methods and num_drafts > self.num_heads:
                raise ValueError(
                    f"num_drafts={num_drafts}: must be <= num_heads={self.num_heads}, because each Medusa "
                    "head drafts one token"
                )
        if not self.methods or not self.num_drafts:
            raise ValueError("methods, num_drafts: must have at least one entry each")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"out={self.out}: must be a new or an empty folder")
