"""Reads the parallel layout of an engine from the columns of a row: tp_size, moe_tp_size, moe_ep_size, ...

The devices of a stage are tp x attention dp = moe_tp x moe_ep. Tables deviate from this in two ways, which
are recognised by their products:

    tp counts devices   moe_tp x moe_ep = tp, attention dp > 1: attention is cut out of them, as in the
                        options of SGLang and TensorRT-LLM; tp 8, dp 8, experts 1 x 8 are 8 devices
    tp is tp x ep       moe_tp x moe_ep = tp, more than a node has: InferenceX's "tp 8, ep 8" on one node
                        of 8, which aiconfigurator stores as tp 64, experts 8 x 8
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from experiments.study.measured_rows import whole
from experiments.study.presets import NotSimulatedError
from hwmodels.iterations.layout import ParallelLayout
from sim.setup.scenario import Scenario


class Read(NamedTuple):
    """The layout of an engine, and the number of devices that its table counts for it."""

    layout: ParallelLayout
    counted_devices: int


def layout_of(row: dict[str, Any], base: Scenario, side: str = "") -> Read:
    """Returns the layout; side: beginning of the columns' names. Raises NotSimulatedError.

    A dense model has no experts, whatever the row says. Experts of unknown layout are distributed where
    attention is data parallel, as engines recommend, else cut.
    """
    tensor, pipeline, data = (whole(row, f"{side}{name}_size") for name in ("tp", "pp", "attention_dp"))
    cut, groups = given(row, f"{side}moe_tp_size"), given(row, f"{side}moe_ep_size")
    counted = tensor * data * pipeline
    if not base.model.has_experts:
        groups = 1
    elif cut is None and groups is None:
        groups = tensor * data if data > 1 else 1
    else:
        cut, groups = cut or 1, groups or 1
        tensor = _tensor_size(tensor, data, cut, groups, base.hardware.gpus_per_node)
        if not tensor:
            raise NotSimulatedError(
                f"{side}moe_tp_size={cut} x {side}moe_ep_size={groups}: must be "
                f"{side}tp_size={row[f'{side}tp_size']:g} x {side}attention_dp_size={data}"
            )
    layout = ParallelLayout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        attention_data_parallel_size=data,
        expert_parallel_size=groups,
    )
    return Read(layout, counted)


def _tensor_size(tensor: int, data: int, cut: int, groups: int, node: int) -> int:
    """Returns the tensor parallel size of attention; 0 if the sizes contradict each other."""
    experts = cut * groups
    if experts == tensor * data:
        is_product = data == 1 and tensor > node >= cut and cut % groups == 0
        return cut if is_product else tensor
    return tensor // data if experts == tensor and tensor % data == 0 else 0


def given(row: dict[str, Any], name: str) -> int | None:
    """Returns a whole number of the row; None for an absent column, an empty cell and 0."""
    value = row.get(name)
    if pd.isna(value) or value == 0:
        return None
    return whole(row, name)
