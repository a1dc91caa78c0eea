"""Storage formats of weights, and the data types in which tensor cores then compute."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.devices.device import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """A storage format of the weights of matrices."""

    name: str
    bits: float
    """Bits per weight, without scales."""
    scale_bytes_per_weight: float = 0.0
    """Bytes of scales and zero points per weight."""
    compute: str | None = None
    """dtype of the matrix multiplication (`devices.device.DTYPE_BYTES`); None: that of the activations."""
    stand_in: str | None = None
    """Compute dtype on chips that lack `compute`; None: the activations' (weights are unpacked first)."""
    source: str = ""

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + self.scale_bytes_per_weight

    def compute_dtype(self, device: Device, activations: str) -> str:
        """Returns the dtype of the tensor cores: the format's own if the chip has it, else the stand-in.

        fp8 on an A100 becomes weight-only: stored in 8 bits, multiplied in the activations' dtype.
        """
        for dtype in (self.compute, self.stand_in):
            if dtype is not None and dtype in device.peak_flops_per_s:
                return dtype
        return device.compute_dtype(activations)

    def falls_back_on(self, device: Device) -> bool:
        """Returns whether the chip lacks the dtype that the format is made for."""
        return self.compute is not None and self.compute not in device.peak_flops_per_s


WEIGHT_FORMATS = {
    f.name: f
    for f in (
        WeightFormat(name="fp32", bits=32, compute="tf32", stand_in="fp32"),
        WeightFormat(name="bf16", bits=16),
        WeightFormat(name="fp16", bits=16),
        WeightFormat(name="fp8", bits=8, compute="fp8", source="one scale per tensor (or per row)"),
        WeightFormat(
            name="fp8_block",
            bits=8,
            scale_bytes_per_weight=4 / (128 * 128),
            compute="fp8",
            source="an fp32 scale for each 128 x 128 weights and each 1 x 128 activations (DeepSeek-V3)",
        ),
        WeightFormat(name="int8", bits=8, compute="int8", source="W8A8, SmoothQuant: int8 tensor cores"),
        WeightFormat(name="int8_wo", bits=8, source="weight-only int8, one scale per row"),
        WeightFormat(
            name="int4_wo",
            bits=4,
            scale_bytes_per_weight=2.5 / 128,
            source="weight-only int4 (AWQ, GPTQ): fp16 scale and 4-bit zero point for 128 weights",
        ),
        WeightFormat(
            name="nvfp4",
            bits=4,
            scale_bytes_per_weight=1 / 16,
            compute="fp4",
            stand_in=None,
            source="an fp8 scale for 16 weights; on chips without fp4 weight-only",
        ),
        WeightFormat(
            name="mxfp4",
            bits=4,
            scale_bytes_per_weight=1 / 32,
            source="an 8-bit exponent for 32 weights (OCP MX); activations stay in bf16 (W4A16)",
        ),
        WeightFormat(
            name="mxfp4_mxfp8",
            bits=4,
            scale_bytes_per_weight=1 / 32,
            compute="fp8",
            source="weights as mxfp4, activations in fp8 with such exponents (W4A8): gpt-oss on Blackwell",
        ),
    )
}
"""Storage formats by name. A weight format of None is the model's own dtype."""

KV_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one element of the KV cache; int8 and int4 add a scale per head and token: `KV_SCALE_BYTES`."""

KV_SCALE_BYTES = {"int8": 2.0, "int4": 4.0}
"""Bytes of the fp16 scale (and zero point) of each head's key or value of a token (KIVI, vLLM)."""


def weight_format(name: str) -> WeightFormat:
    """Returns the format of that name. Raises ValueError if it is unknown."""
    if name not in WEIGHT_FORMATS:
        raise ValueError(f"weights={name}: must be one of {', '.join(WEIGHT_FORMATS)}")
    return WEIGHT_FORMATS[name]
