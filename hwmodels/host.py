"""The CPU's part of an iteration: scheduling, launching, bookkeeping; CUDA graphs, which spare launches."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.checks import check_finite, check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class HostOverhead:
    """Seconds that the engine's process spends around the GPU's work. Part of an engine profile.

    not overlapped:  iteration = max(gpu, launches) + host
    overlapped:      iteration = max(gpu, launches + host)
    with host = iteration_s + sequence_s * sequences, launches = launch_s * kernels (or one graph replay).
    Defaults: the order of magnitude of a Python engine (vLLM v1) on a server CPU; profiles replace them.
    """

    iteration_s: float = 700e-6
    """Per iteration: schedule, prepare inputs, read the tokens back."""
    sequence_s: float = 4e-6
    """Per sequence in it: sampling bookkeeping, detokenising, output."""
    launch_s: float = 4e-6
    """CPU time to launch one kernel from the framework. Launches run ahead of the GPU, hence the max."""
    graph_replay_s: float = 10e-6
    """CPU time to launch a captured graph, whatever its length."""
    overlapped: bool = False
    """The host prepares iteration i+1 while the GPU runs i (asynchronous scheduling)."""

    def __post_init__(self) -> None:
        for name in ("iteration_s", "sequence_s", "launch_s", "graph_replay_s"):
            check_finite(name, getattr(self, name), unit="s", zero_allowed=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaGraphs:
    """Decode-only iterations of up to max_capture_size sequences are one launch, padded to a captured size.

    Everything else (a prompt chunk in the batch, a larger batch, `enabled` false) launches kernel by kernel.
    """

    enabled: bool = True
    max_capture_size: int = 512

    def __post_init__(self) -> None:
        remedy = "; enabled=false does without graphs"
        check_whole("max_capture_size", self.max_capture_size, remedy=remedy)

    @property
    def sizes(self) -> list[int]:
        """Captured batch sizes, vLLM's ladder: 1, 2, 4, every 8 up to 256, every 16 beyond."""
        if not self.enabled:
            return []
        ladder = [1, 2, 4, *range(8, 256, 8), *range(256, self.max_capture_size + 1, 16)]
        return [size for size in ladder if size <= self.max_capture_size]

    def padded(self) -> list[int]:
        """By number of sequences, from 0 up: the captured size that runs them; ends at the largest."""
        padded = [0]
        for size in self.sizes:
            padded += [size] * (size + 1 - len(padded))
        return padded
