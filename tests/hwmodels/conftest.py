"""Presets of the project's own configuration, built as Hydra builds them, and shared fixtures."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from hwmodels.assembly.roofline import Roofline
from hwmodels.device import Device, Link
from hwmodels.iterations import IterationShape, causal_pairs
from hwmodels.iterations.layout import ParallelLayout

CONFIGS = Path(__file__).resolve().parents[2] / "configs"

KINDS = {
    "dense": ("llama3_1_8b", "h100_sxm", {}),
    "tp": ("llama3_1_70b", "h100_sxm", {"tensor_parallel_size": 8}),
    "sp": ("llama3_1_70b", "h100_sxm", {"tensor_parallel_size": 4, "sequence_parallel": True}),
    "pp": ("qwen3_8b", "l40s", {"pipeline_parallel_size": 3, "num_micro_batches": 5}),
    "tp pp": ("llama3_1_70b", "h100_sxm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 4}),
    "cp": ("llama3_1_8b", "h100_sxm", {"context_parallel_size": 4}),
    "window": ("gemma3_27b", "h100_sxm", {"tensor_parallel_size": 2}),
    "moe window": ("gpt_oss_20b", "h100_sxm", {}),
    "moe dp": ("qwen3_30b_a3b", "h100_sxm", {"attention_data_parallel_size": 4}),
    "moe cp ep": (
        "qwen3_30b_a3b",
        "h100_sxm",
        {"tensor_parallel_size": 4, "context_parallel_size": 4, "expert_parallel_size": 16},
    ),
    "mla": ("deepseek_v2_lite", "h100_sxm", {}),
    "mla dp ep": (
        "deepseek_r1",
        "h200_sxm",
        {"attention_data_parallel_size": 8, "expert_parallel_size": 8},
    ),
    "dsa": ("glm_5", "b200_sxm", {"tensor_parallel_size": 8}),
    "hybrid": (
        "qwen3_5_397b_a17b",
        "b200_sxm",
        {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8},
    ),
    "systolic torus": ("llama3_1_70b", "tpu_v5p", {"tensor_parallel_size": 8}),
    "systolic moe": ("qwen3_30b_a3b", "trainium2", {"tensor_parallel_size": 4}),
}
"""Every kind of model and of layout at least once: preset of the model, of the device, layout."""


def build_preset(path: Path):
    node = OmegaConf.load(path)
    node.pop("defaults", None)  # the calibration that a device brings along
    return instantiate(node, _convert_="all")


def _make_shape(contexts=(), chunks=(), completed=True):
    """Decodes with these contexts and chunks of (new, cached) tokens; completed: they end their prompts."""
    new = [n for n, _ in chunks]
    return IterationShape(
        decode_seqs=len(contexts),
        decode_context_tokens=sum(contexts),
        prefill_seqs=len(chunks),
        prefill_tokens=sum(new),
        prefill_pairs=sum(causal_pairs(n, c) for n, c in chunks),
        prefill_context_tokens=sum(n + c for n, c in chunks),
        sampled_seqs=len(contexts) + (len(chunks) if completed else 0),
    )


@pytest.fixture(scope="session")
def make_shape():
    """Returns the maker of an IterationShape of (contexts of decodes, (new, cached) of chunks)."""
    return _make_shape


@pytest.fixture(scope="session")
def models():
    """Builds every ModelSpec of the presets, by name."""
    return {p.stem: build_preset(p) for p in (CONFIGS / "model").glob("*.yaml") if p.stem != "hf"}


@pytest.fixture(scope="session")
def devices():
    """Builds every Device of the presets, by name."""
    return {p.stem: build_preset(p) for p in (CONFIGS / "hardware").glob("*.yaml")}


@pytest.fixture(scope="session", params=KINDS)
def kind(request, models, devices):
    """Returns the settings of a Roofline for every kind of model and of layout in turn."""
    model, device, layout = KINDS[request.param]
    return {"model": models[model], "device": devices[device], "layout": ParallelLayout(**layout)}


@pytest.fixture(scope="session")
def roofline(kind):
    """Builds the Roofline of each kind."""
    return Roofline(**kind)


@pytest.fixture(scope="session")
def toy_device():
    """Returns a device of round figures: 1e15 FLOP/s, 1e12 bytes/s, 100 SMs, 8 GPUs a node.

    Links: 1e11 bytes/s inside the node, 1e10 bytes/s between nodes.
    """
    return Device(
        name="toy",
        memory_bytes=64 * 2.0**30,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"bf16": 1e15, "fp16": 1e15},
        num_sms=100,
        l2_bytes=50e6,
        tdp_w=500,
        idle_w=50,
        pcie=Link(name="PCIe", bandwidth_bytes_per_s=2e10, latency_s=2e-6),
        scale_up=Link(name="NVLink", bandwidth_bytes_per_s=1e11, latency_s=1e-6),
        inter_node=Link(name="InfiniBand", bandwidth_bytes_per_s=1e10, latency_s=1e-5),
        gpus_per_node=8,
        price_usd_per_hour=1.0,
        price_source="test, 2026",
        source="test",
    )
