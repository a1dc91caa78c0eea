"""A record of a dry run on the CPU."""

from __future__ import annotations

import torch

from experiments.gpu.record import Record

CPU = torch.device("cpu")


def make_record(folder, **given):
    return Record(
        folder / "limits.json", "limits", CPU, **{"quick": True, "limit_s": 60.0, "seed": 0, **given}
    )
