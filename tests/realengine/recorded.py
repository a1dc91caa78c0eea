"""Stands for CUDA graphs on a CPU: a replay computes the recorded call again, into the same tensors."""

from dataclasses import fields, is_dataclass

import torch

from realengine.runner.graphs import Recording


class RerunRecorder:
    """Records and counts as `realengine.runner.graphs.Recorder`. Results are junk until a replay."""

    def __init__(self, device):
        self.num_recorded = 0
        self.num_replayed = 0  # in service
        self._is_recording = False
        made.append(self)

    def record(self, prepare, run):
        self._is_recording = True
        prepare()
        first = run()
        prepare()
        result = run()
        self._is_recording = False
        self.num_recorded += 1
        for tensor, other in zip(tensors_of(result), tensors_of(first), strict=True):
            if tensor.data_ptr() == other.data_ptr():
                continue  # it is no result of the call, as the mask of a tree
            tensor.fill_(float("nan") if tensor.is_floating_point() else -99)  # a capture computes nothing

        def replay():
            self.num_replayed += not self._is_recording
            for tensor, again in zip(tensors_of(result), tensors_of(run()), strict=True):
                tensor.copy_(again)

        return Recording(replay, result)


made = []


def tensors_of(value):
    """Yields the tensors of tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def record_on_cpu(monkeypatch):
    """Makes engines on a CPU record their steps if cudagraph_mode asks for it; returns their recorders."""
    made.clear()
    for module in ("runner.graphs", "runner.piecewise"):
        monkeypatch.setattr(f"realengine.{module}.Recorder", RerunRecorder)
    return made
