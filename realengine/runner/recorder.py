"""Records calls as CUDA graphs: one launch in place of hundreds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Recording(NamedTuple, Generic[Result]):
    """A recorded call."""

    replay: Callable[[], None]
    """Runs it again on the tensors that it read, and writes those of its result."""
    result: Result
    """What the call returned; its tensors keep their addresses."""


class Recorder:
    """Records calls on one device. Their graphs share a memory pool, so the largest is recorded first.

    Raises ValueError unless the device is a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"cudagraph_mode: CUDA graphs need a GPU, and the engine runs on the {device.type}; set it "
                "to None or NONE"
            )
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(
            device
        )  # one stream for all, because libraries keep a workspace per stream

    def record(self, prepare: Callable[[], None], run: Callable[[], Result]) -> Recording[Result]:
        """Records `run`, which may neither wait for the device nor copy from the host.

        prepare: makes the input of `run` harmless, because it runs once before the recording.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels before the capture, which cannot
            prepare()
            run()
            prepare()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because NCCL's watchdog thread queries events during the capture.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            result = run()
        return Recording(graph.replay, result)
