"""Measures the machine, writes its config files and checks the table; needs torch."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pandas as pd
import torch
from omegaconf import OmegaConf

from experiments.calibrate.engine import gpu_sections
from experiments.calibrate.engine import measure as cpu_sections
from experiments.calibrate.engine.collectives import RingLink, measure_link
from experiments.calibrate.engine.draft_host import DraftHostTime, measure_draft_host
from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml, latency_yaml, plain
from experiments.calibrate.engine.grids import (
    EVERY_BATCH,
    decode_points,
    longest,
    prefill_points,
    verifying_points,
)
from experiments.calibrate.engine.host_time import HostTime, measure_host
from experiments.calibrate.engine.machine import Machine, measure_machine
from experiments.calibrate.engine.measure import Progress, Sections, Total
from experiments.calibrate.engine.pace import Pace, Reference, in_words
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
from hwmodels.device import Device
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations import IterationModel
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Replica
from hwmodels.levels.files import TableLevel
from hwmodels.model import ModelSpec
from hwmodels.operators import Calibration
from realengine.model.architecture import Architecture
from realengine.model.backend import check_supported, choose_backend, choose_device
from realengine.model.kv_cache import KvCache
from realengine.runner.memory import CPU_KV_BYTES
from realengine.settings import DTYPES
from sim.report.files import table_bytes, write_whole
from sim.settings.build import build
from sim.setup.engine_profile import EngineProfile

NO_HOST = HostOverhead(iteration_s=0.0, sequence_s=0.0, launch_s=0.0, graph_replay_s=0.0)


class Results(NamedTuple):
    """Results to print, and the files to write."""

    operators: pd.DataFrame
    errors: pd.DataFrame
    notes: list[str]
    next_command: str
    files: Files
    pace: Pace | None
    """Pace of a CPU during the measurement; None for a GPU."""
    contents: dict[Path, bytes | str]

    def write(self) -> None:
        """Writes all files. Raises OSError."""
        for file, content in self.contents.items():
            write_whole(file, content)


def check(settings: MeasureSettings, node: Mapping[str, Any]) -> None:
    """Checks the model, the device and the folder.

    Raises ValueError, RuntimeError or OSError for a missing GPU, model, number format or folder.
    """
    check_model(settings.model, node, settings.device)
    _files(settings, settings.device).check()


def check_model(model: ModelSpec, node: Mapping[str, Any], device: str) -> None:
    """Checks that the engine can run the model on the device.

    Raises ValueError or RuntimeError if the GPU is missing or the model or number format is not supported.
    """
    check_supported(
        architecture_of(node),
        choose_backend(None, choose_device(device)),
        DTYPES[TORCH_DTYPES[model.dtype]],
        kv_dtype_of(model),
        quantization=quantization_of(model),
    )


def measure(settings: MeasureSettings, node: Mapping[str, Any], progress: Progress) -> Results:
    """Measures the machine; `Results.write` writes the files. Raises the same errors as `check`."""
    device = choose_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # thread time does not include other threads
    architecture = architecture_of(node)
    name, files = settings.name or machine_name(device.type), _files(settings, device.type)
    progress("the machine")
    machine = measure_machine(device, DTYPES[TORCH_DTYPES[settings.model.dtype]])
    link = _link_between_gpus(device)
    served, sections, totals, reference = _operators(settings, architecture, device, progress)
    usual_s, pace = reference or (None, None)
    progress("the host time")
    with_executor = served if device.type == "cpu" else None
    host = measure_host(settings.limit("max_num_seqs"), settings.block_size, with_executor, usual_s)
    drafts = measure_draft_host(host, settings.block_size, with_executor, usual_s)
    rows = profile_rows(sections, architecture.num_layers)
    chunks_apart = int(served.backend.name == "torch")  # the torch reference computes chunks one by one
    rows = rows.assign(gpu=name, model=settings.model.name, chunks_apart=chunks_apart)
    if device.type == "cuda":  # an operator of the table stands for all that the host launches for it
        num_calls = int(rows.drop_duplicates("operator")["calls"].sum())
        machine = replace(machine, launch_s=gpu_sections.measure_launches(served) / num_calls)
    hardware_text = hardware_yaml(name, machine, link)
    profile = _profile(settings, served, machine, host, drafts)
    undetermined = {f"host.{figure}": ends for figure, ends in host.undetermined.items()} | {
        f"draft_host.{method}.{figure}": ends
        for method, of in drafts.items()
        for figure, ends in of.undetermined.items()
    }
    priced = _priced(settings, device_of(hardware_text), rows, machine)
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
        "link": None if link is None else link._asdict() | {"undetermined": dict(link.undetermined)},
        "host": host._asdict() | {"undetermined": dict(host.undetermined)},
        "draft_host": {
            method: {
                "host": asdict(of.host),
                "steps": [step._asdict() for step in of.steps],
                "undetermined": dict(of.undetermined),
            }
            for method, of in drafts.items()
        },
        "reference_s": usual_s,
        "pace": None if pace is None else pace._asdict(),
        "operators": operators.to_dict("records"),
        "errors": errors.to_dict("records"),
        "iterations": residuals.to_dict("records"),
    }
    contents: dict[Path, bytes | str] = {
        files.table: table_bytes(rows),
        files.hardware: hardware_text,
        files.engine: engine_yaml(name, profile, settings.block_size, undetermined),
        files.latency: latency_yaml(name, settings.model.name, files.table),
        files.report: json.dumps(report, indent=2) + "\n",
    }
    notes = _notes(machine, host, drafts, residuals, pace)
    if undetermined:
        notes.append(
            f"Not determined by the measurements: {', '.join(undetermined)} (ranges: {files.engine})."
        )
    return Results(operators, errors, notes, _next_command(settings, name, files), files, pace, contents)


def check_same(files: Files, model: ModelSpec, block_size: int) -> None:
    """Raises ValueError if a calibration was measured with other number formats or another block size."""
    measured = json.loads(files.report.read_text(encoding="utf-8"))["settings"]
    own = _formats(model) | {"block_size": block_size}
    for name, value in own.items():
        if measured[name] != value:
            raise ValueError(
                f"{files.report}: was measured with {name}={measured[name]}, not {value}; measure again"
            )


def reference_of(files: Files) -> Reference | None:
    """Returns the reference step of a measured CPU, or None for a GPU."""
    report = json.loads(files.report.read_text(encoding="utf-8"))
    if report.get("reference_s") is None:
        return None
    pace = report.get("pace")
    return Reference(report["reference_s"], None if pace is None else Pace(**pace))


def device_of(hardware_text: str) -> Device:
    """Builds the device that a written hardware file describes."""
    node: Any = OmegaConf.to_container(OmegaConf.create(hardware_text))
    del node["defaults"]
    device: Device = build(node, "hardware")
    return device


def _operators(
    settings: MeasureSettings, architecture: Architecture, device: torch.device, progress: Progress
) -> tuple[Served, list[Sections], list[Total], Reference | None]:
    max_num_seqs, max_model_len, max_tokens = (
        settings.limit(name) for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens")
    )
    every = EVERY_BATCH if device.type == "cpu" else 0  # tiles of a GPU hold at least as many rows
    points = decode_points(max_num_seqs, max_model_len, every) + prefill_points(max_tokens, max_model_len)
    if device.type == "cpu":  # only the torch reference computes chunks one by one
        points += verifying_points(max_num_seqs, max_tokens, max_model_len)
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
    """Measures the link between the GPUs; returns None if there are fewer than two."""
    if device.type == "cpu" or torch.cuda.device_count() < 2:
        return None
    return measure_link(device.type, torch.cuda.device_count())


def _profile(
    settings: MeasureSettings,
    served: Served,
    machine: Machine,
    host: HostTime,
    drafts: Mapping[str, DraftHostTime],
) -> EngineProfile:
    """Returns windtunnel's engine with its defaults; on a GPU, overlapped and with CUDA graphs."""
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
        draft_host={method: of.host for method, of in drafts.items()},
    )


def _priced(
    settings: MeasureSettings, device: Device, rows: pd.DataFrame, machine: Machine
) -> IterationModel:
    """Builds the iteration model of latency=table for the executor alone, without the engine's host time."""
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
    with TemporaryDirectory() as folder:
        table = Path(folder) / "table.parquet"
        table.write_bytes(table_bytes(rows))
        return TableLevel(path=str(table)).iteration_model(replica)


def _summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Summarises the rows by operator."""
    grouped = rows.groupby(["component", "operator"], sort=False)
    summary = grouped.agg(
        calls=("calls", "first"),
        points=("latency_us", "size"),
        smallest_us=("latency_us", "min"),
        largest_us=("latency_us", "max"),
    )
    return summary.reset_index()


def _notes(
    machine: Machine,
    host: HostTime,
    drafts: Mapping[str, DraftHostTime],
    residuals: pd.DataFrame,
    pace: Pace | None,
) -> list[str]:
    peaks = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s {dtype}" for dtype, rate in machine.flops_per_s.items())
    notes = [
        f"{machine.name}: memory bandwidth {machine.copy_bytes_per_s / 1e9:.1f} GB/s copying, "
        f"{machine.read_bytes_per_s / 1e9:.1f} GB/s reading; peak {peaks}.",
        f"Host time: {host.iteration_s * 1e6:.0f} us per step, {host.sequence_s * 1e6:.2f} us per sequence.",
        f"With draft tokens in addition: {'; '.join(_in_words(*each) for each in drafts.items())}.",
    ]
    if machine.launch_s:
        notes.append(
            f"Launch time: {machine.launch_s * 1e6:.1f} us per kernel, {machine.graph_replay_s * 1e6:.1f} us "
            f"per CUDA graph. Copies to or from the host: {machine.host_copy_bytes_per_s / 1e9:.1f} GB/s."
        )
    else:
        spread = residuals["spread"].median()
        notes.append(
            f"Spread of the repetitions of one iteration: {spread:.0%} (p90 - p10 over the median, corrected "
            "for the machine's speed)."
        )
    if pace is not None:
        notes.append(f"During the measurement {in_words(pace)}.")
    return notes


def _in_words(method: str, measured: DraftHostTime) -> str:
    host = measured.host
    return (
        f"{method} {host.iteration_s * 1e6:.0f} us per step, {host.sequence_s * 1e6:.1f} us per sequence, "
        f"{host.token_s * 1e6:.1f} us per draft token"
    )


def _next_command(settings: MeasureSettings, name: str, files: Files) -> str:
    """Returns the command that simulates with the written files, and the path of the fit report."""
    chosen = f"hardware={name} engine={name} latency={files.latency.stem}"
    model = f"model=NAME model.dtype={settings.model.dtype}"
    return (
        f"Simulate this machine, with NAME as measured: windtunnel simulate --config-dir {settings.out} "
        f"{chosen} {model}\nFit report: {files.report}"
    )


def machine_name(device: str) -> str:
    """Returns the default name of this machine: cpu, or the GPU's name in the form of a file name."""
    return "cpu" if device == "cpu" else plain(torch.cuda.get_device_name(device))


def _files(settings: MeasureSettings, device: str) -> Files:
    return Files.under(Path(settings.out), settings.name or machine_name(device), settings.model.name)


def _formats(model: ModelSpec) -> dict[str, Any]:
    return {"dtype": model.dtype, "weights": model.weights, "kv_cache_dtype": model.kv_dtype}


def _shown(settings: MeasureSettings) -> dict[str, Any]:
    """Returns the settings with defaults filled in, for the report."""
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
