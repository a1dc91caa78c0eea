"""Which steps run as CUDA graphs, with the names of vLLM's `cudagraph_mode`."""

from __future__ import annotations

from typing import NamedTuple


class GraphMode(NamedTuple):
    """Which steps are captured."""

    full_decodes: bool
    """Decode steps, and passes that verify drafts, attention included."""
    piecewise: bool
    """The pieces of other steps between their attentions."""

    @property
    def captures(self) -> bool:
        """True if anything is captured."""
        return self.full_decodes or self.piecewise


MODES = {
    "NONE": GraphMode(full_decodes=False, piecewise=False),
    "PIECEWISE": GraphMode(full_decodes=False, piecewise=True),
    "FULL_DECODE_ONLY": GraphMode(full_decodes=True, piecewise=False),
    "FULL_AND_PIECEWISE": GraphMode(full_decodes=True, piecewise=True),
}


def check_mode(name: str | None) -> None:
    """Raises ValueError unless a mode exists; None: it depends on the device."""
    if name == "FULL":
        raise ValueError(
            "cudagraph_mode=FULL: attention of prompt chunks is not captured; set FULL_AND_PIECEWISE"
        )
    if name is not None and name not in MODES:
        raise ValueError(f"cudagraph_mode={name}: must be one of {', '.join(MODES)}, or None")


def mode_of(name: str | None, *, is_gpu: bool) -> GraphMode:
    """Returns the mode of a name; None: FULL_AND_PIECEWISE on a GPU, NONE on a CPU."""
    if name is None:
        name = "FULL_AND_PIECEWISE" if is_gpu else "NONE"
    return MODES[name]
