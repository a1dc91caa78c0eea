"""Settings of `windtunnel calibrate device=...`: device, model, largest sizes and time of the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, Ge, OneOf, Positive, Unit, check
from hwmodels.checks import check_whole
from hwmodels.model import ModelSpec

DEVICES = ("cpu", "cuda")
DEFAULT_OUT = "mine"
LIMITS = {
    "cpu": {"max_num_seqs": 32, "max_model_len": 1024, "max_num_batched_tokens": 1024, "budget_s": 45.0},
    "cuda": {"max_num_seqs": 256, "max_model_len": 8192, "max_num_batched_tokens": 8192, "budget_s": 300.0},
}
"""Default limits of the measured sizes and time; beyond the largest size, the table is extrapolated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings(Checked):
    """Settings of `windtunnel calibrate device=...`."""

    device: Annotated[str, OneOf(DEVICES)]
    """The device that the engine runs on: cpu or cuda."""
    model: ModelSpec
    out: str = DEFAULT_OUT
    """Folder of the user's own configs, to which the files are written."""
    name: str | None = None
    """Name of the machine, as in hardware=NAME; None: cpu, or the name of the GPU."""
    max_num_seqs: int | None = None
    max_model_len: Annotated[int | None, Ge(64)] = None
    max_num_batched_tokens: Annotated[int | None, Ge(8)] = None
    block_size: int = 16
    budget_s: Annotated[Positive | None, Unit("s")] = None
    """Time of the measurement, in seconds; at least one warm-up round and three more are run."""
    iterations: int = 60
    """Number of random iterations with which the table is checked."""
    seed: int = 0

    def __post_init__(self) -> None:
        check(self)
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "iterations"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value)
        if self.name is not None and not self.name.isidentifier():
            raise ValueError(f"name={self.name}: must consist of letters, digits and _, for a file name")

    def limit(self, name: str) -> int:
        """Returns max_num_seqs, max_model_len (at most the model's context) or max_num_batched_tokens."""
        given: int | None = getattr(self, name)
        value = int(LIMITS[self.device][name]) if given is None else given
        return min(value, self.model.max_position_embeddings) if name == "max_model_len" else value

    @property
    def seconds(self) -> float:
        """Wall time that the measurements may take, in seconds."""
        return LIMITS[self.device]["budget_s"] if self.budget_s is None else self.budget_s
