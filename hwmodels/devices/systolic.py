"""Systolic arrays, the matrix units of TPUs, AWS Neuron and Gaudi: sizes to which products are padded.

An array of rows x columns multiplies and adds once per cell and cycle. Tiles of one operand stay in the cells
while the other streams through, so every product is padded to whole tiles:

    weights stay (TPU, Neuron)    k to rows, n to columns; a tile of weights takes `rows` cycles to load
                                  behind the rows of activations that stream, so m counts as `rows` at least
    outputs stay (Gaudi)          m to rows, n to columns

Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit", ISCA 2017 (weights stay);
Lee et al., "Debunking the CUDA Myth Towards GPU-based AI Systems", ISCA 2025 (Gaudi, arXiv 2501.00210).
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import Checked, PositiveInt


@dataclass(frozen=True, kw_only=True, slots=True)
class SystolicArray(Checked):
    """Shape of each array of a device; how many there are follows from the device's peak."""

    rows: PositiveInt
    columns: PositiveInt
    outputs_stay: bool = False
    """Whether sums stay in the cells and both operands stream; false: weights stay."""
