"""Checkpoints with FP8 weights (e4m3): dequantised when they are read, or kept with a scale per output.

| scales beside `x.weight` | shape | stored by |
| --- | --- | --- |
| weight_scale | [], [1], [N] or [N, 1] | quant_method fp8 and compressed-tensors: per tensor, or per output |
| weight_scale_inv | [N / 128, K / 128], rounded up | DeepSeek-V3, Qwen3: per block |

A stored number times its scale is the weight. Scales of activations (`input_scale`) are not used, because the
engine computes one per token. N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kernels.w8a8 import ScaledTensor
from realengine.weights.quantized_formats import FP8_BLOCK
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.weight import Weight

SCALES = ("weight_scale", "weight_scale_inv")
UNUSED = ("input_scale", "k_scale", "v_scale", "output_scale")


class Fp8Checkpoint:
    """A checkpoint whose FP8 tensors are read as floats; their scales are not listed."""

    def __init__(self, checkpoint: SafetensorsCheckpoint) -> None:
        self._inner = checkpoint
        self._scale_of: dict[str, str] = {}
        left_out = set()
        for name in checkpoint.shapes:
            stem, _, kind = name.rpartition(".")
            if kind in UNUSED:
                left_out.add(name)
            elif kind in SCALES:
                left_out.add(name)
                self._scale_of[f"{stem}.weight"] = name
        self.shapes = {name: shape for name, shape in checkpoint.shapes.items() if name not in left_out}

    def where(self, name: str) -> Path:
        """Returns the file that holds, or should hold, a tensor."""
        return self._inner.where(name)

    def read(self, name: str, take: Sequence[slice], *, integers: bool = False) -> torch.Tensor:
        """Reads the part `take` of a tensor: FP8 times its scales in fp32, others as stored."""
        if integers or not self._inner.is_fp8(name):
            return self._inner.read(name, take, integers=integers)
        values = self._inner.read_fp8(name, take).float()
        scales = self._scales(name)
        if scales.dim() == 2:
            rows, columns = (torch.arange(each.start, each.stop) // FP8_BLOCK for each in take)
            return values * scales[rows][:, columns]
        return values * (scales if scales.dim() == 0 else scales[take[0], None])

    def kept(self, share: Weight, device: torch.device) -> ScaledTensor | None:
        """Returns a rank's share of a linear layer in FP8 as it is stored, with a scale per output.

        None: a part is not in FP8, or has scales per block.
        """
        values, scales = [], []
        for part in share.parts:
            if not self._inner.is_fp8(part.name):
                return None
            scale = self._scales(part.name)
            if scale.dim() == 2:
                return None
            rows = part.take[0].stop - part.take[0].start
            values.append(self._inner.read_fp8(part.name, part.take))
            scales.append(scale.expand(rows) if scale.dim() == 0 else scale[part.take[0]])
        codes = torch.cat([each.view(torch.uint8) for each in values]).to(device)
        return ScaledTensor(codes.view(torch.float8_e4m3fn), torch.cat(scales).to(device))

    def _scales(self, name: str) -> torch.Tensor:
        """Returns the scales of a tensor in fp32: one, one per output, or [N / 128, K / 128]."""
        stored = self._scale_of.get(name)
        if stored is None:
            raise ValueError(f"{self.where(name)}: {name} is F8_E4M3 without {' or '.join(SCALES)} beside it")
        shape = self._inner.shapes[stored]
        scales = self._inner.read(stored, [slice(0, size) for size in shape]).float()
        if not scales.isfinite().all():
            raise ValueError(f"{self.where(stored)}: {stored}: contains infinite numbers or NaN")
        num_outputs = self.shapes[name][0]
        if scales.numel() == 1:
            return scales.reshape(())
        if shape in ((num_outputs,), (num_outputs, 1)):
            return scales.flatten()
        blocks = tuple(-(-size // FP8_BLOCK) for size in self.shapes[name])
        if shape != blocks:
            raise ValueError(
                f"{self.where(stored)}: {stored} is {list(shape)}, must be one scale, one for each of "
                f"{num_outputs} outputs, or {list(blocks)}"
            )
        return scales
