"""The measurement from beginning to end: needs torch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from omegaconf import OmegaConf

from experiments.calibrate.engine import gpu_sections
from experiments.calibrate.engine import measure as cpu_sections
from experiments.calibrate.engine.collectives import RingLink, measure_link
from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml, latency_yaml, plain
from experiments.calibrate.engine.grids import decode_points, longest, prefill_points
from experiments.calibrate.engine.host_time import HostTime, measure_host
from experiments.calibrate.engine.machine import Machine, measure_machine
from experiments.calibrate.engine.measure import Progress, Sections, Total
from experiments.calibrate.engine.profile_rows import profile_rows
from experiments.calibrate.engine.residuals import errors_by_kind, random_steps, residual_table
from experiments.calibrate.engine.served import (
    TORCH_DTYPES,
    Served,
    architecture_of,
    kv_dtype_of,
    quantization_of,
    serve,
)
from experiments.calibrate.engine.settings import MeasureSettings
from hwmodels.assembly.site import Kernels
from hwmodels.devices.device import Device
from hwmodels.devices.host import CudaGraphs, HostOverhead
from hwmodels.iterations.iteration import IterationModel
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.files import TableLevel
from hwmodels.levels.rooflines import Replica
from hwmodels.model.model_spec import ModelSpec
from hwmodels.operators.calibration import Calibration
from realengine.model.architecture import Architecture
from realengine.model.backend import check_supported, choose_backend, choose_device
from realengine.model.kv_cache import KvCache
from realengine.runner.rank import CPU_KV_BYTES
from realengine.settings import DTYPES
from sim.report.files import write_table
from sim.settings.build import build
from sim.setup.engine_profile import EngineProfile

NO_HOST = HostOverhead(iteration_s=0.0, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0)


class Found(NamedTuple):
    """What there is to print."""

    operators: pd.DataFrame
    errors: pd.DataFrame
    notes: list[str]
    how_to: str
    files: Files


def check(settings: MeasureSettings, node: Mapping[str, Any]) -> None:
    """Raises ValueError, RuntimeError or OSError for a missing GPU, model, format or folder."""
    check_model(settings.model, node, settings.device)
    _files(settings, settings.device).check()


def check_model(model: ModelSpec, node: Mapping[str, Any], device: str) -> None:
    """Raises ValueError or RuntimeError for a missing GPU, and for what the engine does not compute on it."""
    check_supported(
        architecture_of(node),
        choose_backend(None, choose_device(device)),
        DTYPES[TORCH_DTYPES[model.dtype]],
        kv_dtype_of(model),
        quantization=quantization_of(model),
    )


def measure(settings: MeasureSettings, node: Mapping[str, Any], progress: Progress) -> Found:
    """Measure and write; the same errors as `check`."""
    device = choose_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # thread time sees no other
    architecture = architecture_of(node)
    name, files = settings.name or machine_name(device.type), _files(settings, device.type)
    progress("the machine")
    machine = measure_machine(device, DTYPES[TORCH_DTYPES[settings.model.dtype]])
    link = _link_between_gpus(device)
    served, sections, totals, usual_s = _operators(settings, architecture, device, progress)
    progress("the host")
    with_executor = served if device.type == "cpu" else None
    host = measure_host(settings.limit("max_num_seqs"), settings.block_size, with_executor)
    rows = profile_rows(sections, architecture.num_layers)
    chunks_apart = int(served.backend.name == "torch")  # the reference goes through them one by one
    rows = rows.assign(gpu=name, model=settings.model.name, chunks_apart=chunks_apart)
    write_table(rows, files.table)
    hardware_text = hardware_yaml(name, machine, link)
    files.hardware.write_text(hardware_text, encoding="utf-8")
    profile = _profile(settings, served, machine, host)
    files.engine.write_text(engine_yaml(name, profile, settings.block_size), encoding="utf-8")
    files.latency.write_text(latency_yaml(name, settings.model.name, files.table), encoding="utf-8")
    priced = _priced(settings, device_of(hardware_text), files.table, machine)
    steps = [total.step for total in totals]
    residuals = residual_table(
        steps,
        [total.seconds for total in totals],
        [float(priced.seconds(step.shape)) for step in steps],
    ).assign(spread=[total.spread for total in totals])
    operators, errors = _summary(rows), errors_by_kind(residuals)
    report = {
        "settings": _shown(settings),
        "environment": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{package: importlib.metadata.version(package) for package in ("torch", "triton", "numpy")},
        },
        "machine": asdict(machine),
        "link": None if link is None else link._asdict(),
        "host": host._asdict(),
        "reference_s": usual_s,
        "operators": operators.to_dict("records"),
        "errors": errors.to_dict("records"),
        "iterations": residuals.to_dict("records"),
    }
    files.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return Found(operators, errors, _notes(machine, host, residuals), _how_to(settings, name, files), files)


def check_same(files: Files, model: ModelSpec, block_size: int) -> None:
    """Raises ValueError where a calibration was of other number formats, or of other blocks."""
    measured = json.loads(files.report.read_text(encoding="utf-8"))["settings"]
    own = _formats(model) | {"block_size": block_size}
    for name, value in own.items():
        if measured[name] != value:
            raise ValueError(
                f"{files.report}: {name}={measured[name]} was measured, not {value}; measure it anew"
            )


def reference_s(files: Files) -> float | None:
    """What a step of reference took on a CPU, at its usual pace; None on a GPU, whose pace is its own."""
    seconds: float | None = json.loads(files.report.read_text(encoding="utf-8")).get("reference_s")
    return seconds


def device_of(hardware_text: str) -> Device:
    """The device that a written file describes."""
    node: Any = OmegaConf.to_container(OmegaConf.create(hardware_text))
    del node["defaults"]
    device: Device = build(node, "hardware")
    return device


def _operators(
    settings: MeasureSettings, architecture: Architecture, device: torch.device, progress: Progress
) -> tuple[Served, list[Sections], list[Total], float | None]:
    max_num_seqs, max_model_len, max_tokens = (
        settings.limit(name) for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    )
    points = decode_points(max_num_seqs, max_model_len) + prefill_points(max_tokens, max_model_len)
    progress("loading")
    served = serve(
        settings.model,
        architecture,
        device,
        max_num_seqs=max_num_seqs,
        max_model_len=longest(points),
        block_size=settings.block_size,
        seed=settings.seed,
    )
    steps = random_steps(
        settings.iterations,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_tokens,
        seed=settings.seed,
    )
    if device.type == "cuda":
        sections = gpu_sections.measure_sections(served, points, progress)
        return served, sections, gpu_sections.measure_totals(served, steps), None
    return served, *cpu_sections.measure(served, points, steps, settings.seconds, settings.seed, progress)


def _link_between_gpus(device: torch.device) -> RingLink | None:
    """None where there is one, or none."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return None
    return measure_link(device.type, torch.cuda.device_count())


def _profile(settings: MeasureSettings, served: Served, machine: Machine, host: HostTime) -> EngineProfile:
    """Our engine as it is by default on the device: overlapped and with graphs on a GPU."""
    on_gpu = served.device.type == "cuda"
    block_bytes = KvCache.bytes_per_block(
        served.architecture, settings.block_size, kv_dtype_of(settings.model)
    )
    max_num_seqs = settings.limit("max_num_seqs")
    return EngineProfile(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=settings.limit("max_num_batched_tokens"),
        max_model_len=settings.limit("max_model_len"),
        num_kv_blocks=None if on_gpu else CPU_KV_BYTES // block_bytes - 1,
        host=HostOverhead(
            iteration_s=host.iteration_s,
            sequence_s=host.sequence_s,
            launch_s=machine.launch_s,
            graph_replay_s=machine.graph_replay_s,
            overlapped=on_gpu,
        ),
        cuda_graphs=CudaGraphs(enabled=on_gpu, max_capture_size=min(max_num_seqs, 512)),
    )


def _priced(settings: MeasureSettings, device: Device, table: Path, machine: Machine) -> IterationModel:
    """What latency=table says of an executor without an engine around it."""
    on_gpu = settings.device == "cuda"
    host = HostOverhead(
        iteration_s=0.0, sequence_s=0.0, launch_s=machine.launch_s, graph_replay_s=machine.graph_replay_s
    )
    replica = Replica(
        model=settings.model,
        device=device,
        layout=ParallelLayout(),
        calibration=Calibration(),
        host=host if on_gpu else NO_HOST,
        cuda_graphs=CudaGraphs(enabled=on_gpu, max_capture_size=min(settings.limit("max_num_seqs"), 512)),
        kernels=Kernels(),
    )
    return TableLevel(path=str(table)).iteration_model(replica)


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One line an operator."""
    grouped = rows.groupby(["component", "operator"], sort=False)
    summary = grouped.agg(
        calls=("calls", "first"),
        points=("latency_us", "size"),
        smallest_us=("latency_us", "min"),
        largest_us=("latency_us", "max"),
    )
    return summary.reset_index()


def _notes(machine: Machine, host: HostTime, residuals: pd.DataFrame) -> list[str]:
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in machine.flops_per_s.items())
    notes = [
        f"{machine.name}: {machine.copy_bytes_per_s / 1e9:.1f} GB/s copied, "
        f"{machine.read_bytes_per_s / 1e9:.1f} GB/s read, {peaks}.",
        f"Host: {host.iteration_s * 1e6:.0f} us a step and {host.sequence_s * 1e6:.2f} us a sequence.",
    ]
    if machine.launch_s:
        launches = f"{machine.launch_s * 1e6:.1f} us a kernel, {machine.graph_replay_s * 1e6:.1f} us a graph"
        notes.append(f"Launches: {launches}; {machine.host_copy_bytes_per_s / 1e9:.1f} GB/s to the host.")
    else:
        spread = residuals["spread"].median()
        notes.append(
            f"Repetitions of one iteration, at one pace: spread of {spread:.0%} (p90 - p10 over the median)."
        )
    return notes


def _how_to(settings: MeasureSettings, name: str, files: Files) -> str:
    chosen = f"hardware={name} engine={name} latency={files.latency.stem}"
    model = f"model=... model.dtype={settings.model.dtype}"
    return f"windtunnel simulate --config-dir {settings.out} {chosen} {model}   (report: {files.report})"


def machine_name(device: str) -> str:
    """Of cpu or cuda, as a file's name."""
    return "cpu" if device == "cpu" else plain(torch.cuda.get_device_name(device))


def _files(settings: MeasureSettings, device: str) -> Files:
    return Files.under(Path(settings.out), settings.name or machine_name(device), settings.model.name)


def _formats(model: ModelSpec) -> dict[str, Any]:
    return {"dtype": model.dtype, "weights": model.weights, "kv_cache_dtype": model.kv_dtype}


def _shown(settings: MeasureSettings) -> dict[str, Any]:
    """As they took effect."""
    limits = ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    return {
        "device": settings.device,
        "model": settings.model.name,
        **_formats(settings.model),
        **{name: settings.limit(name) for name in limits},
        "block_size": settings.block_size,
        "budget_s": settings.seconds,
        "seed": settings.seed,
    }
