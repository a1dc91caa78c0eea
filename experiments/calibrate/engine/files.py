"""Files that a measurement writes into a folder of the user's own configs, for `--config-dir`.

hardware/NAME.yaml           the machine: peaks, bandwidth, memory
engine/NAME.yaml             the engine on it: limits of the measurement, host time, CUDA graphs
latency/NAME_MODEL.yaml      the measured table as a choice of the group latency
profiles/NAME_MODEL.parquet  the table
profiles/NAME_MODEL.json     the fit report
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from experiments.app.job import CannotWriteError
from experiments.study.yaml_text import figure, quoted
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.speculation.steps import DraftHost
from sim.setup.engine_profile import EngineProfile

if TYPE_CHECKING:  # they need torch
    from experiments.calibrate.engine.collectives import RingLink
    from experiments.calibrate.engine.machine import Machine

Undetermined: TypeAlias = Mapping[str, tuple[float, float]]
"""Figure -> the range of values that fit the measurements equally well."""
WRITTEN_BY = "# Written by `windtunnel calibrate`"
"""Comment that marks the files that a later measurement may overwrite."""
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of the disk, not of the setting out=."""
UNKNOWN_TDP_W = 1.0
"""Placeholder, because `Device` requires a TDP."""


class Files(NamedTuple):
    """Paths of the files that a measurement writes."""

    hardware: Path
    engine: Path
    latency: Path
    table: Path
    report: Path

    @classmethod
    def under(cls, folder: Path, name: str, model: str) -> Files:
        """Returns the paths below a folder for a machine's name and a model's name."""
        both = f"{name}_{plain(model)}"
        return cls(
            folder / "hardware" / f"{name}.yaml",
            folder / "engine" / f"{name}.yaml",
            folder / "latency" / f"{both}.yaml",
            folder / "profiles" / f"{both}.parquet",
            folder / "profiles" / f"{both}.json",
        )

    def check(self) -> None:
        """Creates the folders.

        Raises ValueError if a file cannot be written, or exists and was not written by calibrate, and
        CannotWriteError if the disk is full or broken.
        """
        for file in self:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                if file.suffix == ".yaml" and file.exists() and WRITTEN_BY not in file.read_text("utf-8"):
                    raise ValueError(
                        f"out: {file} was not written by calibrate; choose another out= or measure.name="
                    )
                _check_writable(file)
            except OSError as error:
                text = (
                    f"out={self.hardware.parents[1]}: cannot be written: {error.strerror}: {error.filename}"
                )
                if error.errno in DISK_ERRORS:
                    raise CannotWriteError(text) from error
                raise ValueError(text) from error


def _check_writable(file: Path) -> None:
    """Raises OSError if a file cannot be written; an empty file is never left under its name."""
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with part.open("wb"):
            pass
    finally:
        part.unlink(missing_ok=True)


def plain(name: str) -> str:
    """Returns the name in the form of a file name: lower-case letters, digits and _."""
    return re.sub(r"[^a-z0-9]+", "_", name.rsplit("/", 1)[-1].lower()).strip("_")


def hardware_yaml(name: str, machine: Machine, link: RingLink | None = None) -> str:
    """Returns the text of a choice of the group hardware.

    link: between the devices of the machine; None if there is only one.
    """
    gib = machine.memory_bytes / 2**30
    rate, best = machine.bandwidth_bytes_per_s, max(machine.flops_per_s.values())
    peaks = "\n".join(f"  {dtype}: {figure(peak)}" for dtype, peak in machine.flops_per_s.items())
    return f"""\
# {machine.name}, measured: {gib:.0f} GiB at {rate / 1e9:,.0f} GB/s, {best / 1e12:.3g} TFLOP/s
{WRITTEN_BY}; the next measurement overwrites it.
defaults:
  - override /calibration@_global_.calibration: none

_target_: hwmodels.device.Device
name: {name}
source: {quoted(f"measured by windtunnel calibrate on {machine.name}, {date.today().isoformat()}")}
memory_bytes: {machine.memory_bytes}  # as the system reports it
memory_bandwidth_bytes_per_s: {figure(rate)}  # the faster of copying and reading
peak_flops_per_s:  # the fastest square matrix product; on a CPU, with one thread
{peaks}
num_sms: {machine.num_sms}
l2_bytes: {machine.cache_bytes}  # as the system reports it
tdp_w: {figure(UNKNOWN_TDP_W)}  # not known: energy figures mean nothing until it is set
idle_w: 0  # not known
gpus_per_node: {1 if link is None else link.num_ranks}
pcie:
  _target_: hwmodels.device.Link
  name: {"host copy" if machine.launch_s else "memory"}
  bandwidth_bytes_per_s: {figure(machine.host_copy_bytes_per_s)}
  latency_s: {figure(machine.host_copy_s / 2)}
scale_up: {_link(link)}
price_usd_per_hour: 0
price_source: not known; set price_usd_per_hour for cost figures
"""


def _link(link: RingLink | None) -> str:
    if link is None:
        return "null"
    return f"""
  _target_: hwmodels.device.Link
  name: all-reduces of {link.num_ranks}
  bandwidth_bytes_per_s: {figure(link.bandwidth_bytes_per_s)}  # reached by a ring all-reduce{
        in_range(link.undetermined, "bandwidth_bytes_per_s", "; ")
    }
  latency_s: {figure(link.latency_s)}{in_range(link.undetermined, "latency_s")}"""


def in_range(undetermined: Undetermined, name: str, begin: str = "  # ") -> str:
    """Returns the remark on a figure that the measurements do not determine; empty if they do."""
    if name not in undetermined:
        return ""
    low, high = undetermined[name]
    return f"{begin}not determined: {figure(low)} to {figure(high)} fit equally well"


def engine_yaml(
    name: str, profile: EngineProfile, block_size: int, undetermined: Undetermined = MappingProxyType({})
) -> str:
    """Returns the text of a choice of the group engine: windtunnel's engine with its default policies.

    undetermined: ranges of host times that the measurements do not determine, by their place in the profile
    (`host.sequence_s`, `draft_host.ngram.token_s`).
    """
    host, graphs = profile.host, profile.cuda_graphs
    settings, captured = _figures(host, undetermined, "host"), _figures(graphs, {}, "cuda_graphs")
    drafts = "".join(
        f"\n  {method}:\n    _target_: hwmodels.speculation.steps.DraftHost\n"
        + _figures(of, undetermined, f"draft_host.{method}", indent=4)
        for method, of in profile.draft_host.items()
    )
    blocks = "null" if profile.num_kv_blocks is None else profile.num_kv_blocks
    share = "null" if profile.gpu_memory_utilization is None else profile.gpu_memory_utilization
    return f"""\
# windtunnel's own engine on {name}, with the measured host time and the limits of the measurement
{WRITTEN_BY}; the next measurement overwrites it.
defaults:
  - override /batching@_global_.batching: chunked
  - override /scheduling@_global_.scheduling: fcfs
  - override /caching@_global_.caching: prefix

_target_: sim.setup.engine_profile.EngineProfile
max_num_seqs: {profile.max_num_seqs}
max_num_batched_tokens: {profile.max_num_batched_tokens}
max_model_len: {profile.max_model_len}
gpu_memory_utilization: {share}
memory_profile: {profile.memory_profile}
version: {profile.version or "null"}
num_kv_blocks: {blocks}  # blocks of {block_size} tokens
swap_space_gib: {profile.swap_space_gib:g}
frontend_s: 0
host:
  _target_: hwmodels.host.HostOverhead
{settings}
cuda_graphs:
  _target_: hwmodels.host.CudaGraphs
{captured}
# in iterations with draft tokens, beside host
draft_host:{drafts or " {}"}
"""


def _figures(
    of: HostOverhead | CudaGraphs | DraftHost, undetermined: Undetermined, place: str, indent: int = 2
) -> str:
    return "\n".join(
        f"{' ' * indent}{field}: {_written(getattr(of, field))}{in_range(undetermined, f'{place}.{field}')}"
        for field in type(of).__slots__
    )


def latency_yaml(name: str, model: str, table: Path) -> str:
    """Returns the text of a choice of the group latency."""
    return f"""\
# {model} in windtunnel's own engine on {name}, measured and interpolated
{WRITTEN_BY}; the next measurement overwrites it.
_target_: hwmodels.levels.files.TableLevel
path: {quoted(str(table.resolve()))}
gpu: null
model: null
"""


def _written(value: float | bool) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else figure(value)
        if isinstance(value, float)
        else str(value)
    )
