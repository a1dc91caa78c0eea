"""Changes models of the simulator for the worse, and finds which rows of the gallery move or fall out.

    python -m experiments.reproduce.mutations                       # all simulated rows; minutes to an hour
    python -m experiments.reproduce.mutations decoding awq_speed    # families or rows by name

A row that holds whatever the simulator does says nothing about it. A row of kind `simulated` must therefore
move by `LEAST_MOVE` under one of `MUTATIONS` with a factor of 1.1, or fall out of its band under a larger
one of `FACTORS`. The findings are kept in `mutations.csv`, which the gallery prints beside the rows:

    row, mutation   one line for every mutation that moves the row
    change          ours with a factor of 1.1 over ours without, less 1
    falls_at        the smallest of `FACTORS` with which the row falls out of its band; empty: none of those
                    that were tried, up to `tried`

Values change in memory, in a process of its own for every mutation; no file does.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from experiments.papers import distserve_prices, splitwise_prices
from experiments.papers.speculation import speedup
from experiments.reproduce.claims import FAMILIES, decoding, speculation
from experiments.reproduce.command import chosen
from experiments.reproduce.findings import FILE, LEAST_FACTOR, Finding, known
from experiments.reproduce.rows import Kind, Row
from experiments.reproduce.tasks import VALUE, planned, result_of
from experiments.reproduce.verdicts import State, Verdict
from hwmodels.devices.device import Device
from hwmodels.devices.host import HostShare
from hwmodels.model.attention import GroupedQueryAttention, LatentAttention
from hwmodels.operators.attention import HeadLayout
from hwmodels.operators.calibration import Calibration
from hwmodels.operators.mla import MlaHeads
from hwmodels.tariff import Tariff
from sim.metrics.paired import mean_interval
from sim.settings import build as building
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.speculation.acceptance import rates
from sim.speculation.acceptance.draws import uniforms

FACTORS = (LEAST_FACTOR, 1.25, 1.5, 2.0)
LEAST_MOVE = 0.01

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what replaces it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A change of one kind of figure for the worse, by a factor >= 1."""

    what: str
    """The figure, in a few words."""
    patches: Callable[[float], list[Patch]]

    @contextmanager
    def applied(self, factor: float) -> Iterator[None]:
        """Applies the change inside of the context. Objects that were built before keep their figures."""
        with ExitStack() as stack:
            for target, name, value in self.patches(factor):
                stack.enter_context(patch.object(target, name, value))
            yield


def _of_built(kind: type, change: Callable[[Any], Any]) -> list[Patch]:
    """Returns the patch that changes every object of a kind as it is built from the config."""
    original = building.build_as

    def changed(target: Callable[..., Any], node: Any, key: str) -> Any:
        found = original(target, node, key)
        return change(found) if isinstance(found, kind) else found

    return [(building, "build_as", changed)]


def _scaled(owner: type, name: str, factor: float) -> Patch:
    """Returns the patch of a method or property of a class whose number is multiplied."""
    original = owner.__dict__[name]
    if isinstance(original, property):
        assert original.fget is not None
        getter = original.fget
        return owner, name, property(lambda self: factor * getter(self))
    return owner, name, lambda self, *args, **more: factor * original(self, *args, **more)


def _bandwidth(factor: float) -> list[Patch]:
    return _of_built(
        Device,
        lambda device: replace(
            device, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / factor
        ),
    )


def _compute(factor: float) -> list[Patch]:
    def slower(device: Device) -> Device:
        peaks = {dtype: peak / factor for dtype, peak in device.peak_flops_per_s.items()}
        return replace(device, peak_flops_per_s=peaks)

    return _of_built(Device, slower)


def _launches(factor: float) -> list[Patch]:
    in_a_stream, init = Calibration.in_a_stream, HostShare.__init__

    def slower(self: Calibration) -> Calibration:
        found = in_a_stream(self)
        attention = replace(
            found.attention,
            decode_start_s=factor * found.attention.decode_start_s,
            prefill_start_s=factor * found.attention.prefill_start_s,
        )
        collectives = replace(
            found.collectives,
            start_s=factor * found.collectives.start_s,
            direct_start_s=factor * found.collectives.direct_start_s,
        )
        return replace(
            found,
            gemm=replace(found.gemm, start_s=factor * found.gemm.start_s),
            attention=attention,
            mla=replace(found.mla, start_s=factor * found.mla.start_s),
            moe=replace(found.moe, kernel_s=factor * found.moe.kernel_s),
            stream=replace(found.stream, start_s=factor * found.stream.start_s),
            collectives=collectives,
        )

    def launched(self: HostShare, host: Any, *args: Any, **more: Any) -> None:
        times = {"launch_s": factor * host.launch_s, "graph_replay_s": factor * host.graph_replay_s}
        init(self, replace(host, **times), *args, **more)

    return [(Calibration, "in_a_stream", slower), (HostShare, "__init__", launched)]


def _kv_bytes(factor: float) -> list[Patch]:
    name = "kv_bytes_per_token"
    owners = (GroupedQueryAttention, LatentAttention, HeadLayout)
    return [
        *(_scaled(owner, name, factor) for owner in owners),
        _scaled(MlaHeads, "latent_bytes_per_token", factor),
    ]


def _acceptance(factor: float) -> list[Patch]:
    def rarer(*args: Any, **more: Any) -> Any:
        # A token is accepted if its number, uniform between 0 and 1, is below its rate.
        return factor * uniforms(*args, **more)

    def priced(comparison: Any, row: Any) -> float:
        fewer = replace(row, tokens=1 + (row.tokens - 1) / factor)
        return float(speedup(comparison, fewer))

    return [
        (rates, "uniforms", rarer),
        (speculation, "speedup", priced),
        (decoding, "speedup", priced),
    ]


def _discount(factor: float) -> list[Patch]:
    def dearer(tariff: Tariff) -> Tariff:
        cut = {
            name: min(1.0, factor * getattr(tariff, name))
            for name in ("batch_factor", "read_factor")
            if getattr(tariff, name) < 1
        }
        return replace(tariff, **cut)

    return _of_built(Tariff, dearer)


def _measured_times(factor: float) -> list[Patch]:
    owners = (distserve_prices.ProfiledModel, splitwise_prices.TimedModel)
    return [_scaled(owner, "seconds", factor) for owner in owners]


MUTATIONS: Mapping[str, Mutation] = {
    "bandwidth": Mutation(what="memory bandwidth of every device, divided", patches=_bandwidth),
    "compute": Mutation(what="peak FLOP/s of every device, divided", patches=_compute),
    "launches": Mutation(
        what="starts of kernels and collectives, launches by the host, multiplied", patches=_launches
    ),
    "kv_bytes": Mutation(what="bytes of KV per token, in memory and read, multiplied", patches=_kv_bytes),
    "acceptance": Mutation(what="rates with which draft tokens are accepted, divided", patches=_acceptance),
    "discount": Mutation(what="prices of batch APIs and of cached tokens, multiplied", patches=_discount),
    "measured_times": Mutation(
        what="iteration times that authors measured, where rows have them, multiplied",
        patches=_measured_times,
    ),
}


def figures_under(mutation: str | None, factor: float, names: Sequence[str]) -> dict[str, float]:
    """Returns ours of rows under a mutation, by name.

    It is NaN for a row whose settings no longer run, and infinite for a ratio to nothing.
    mutation: None for none. All tasks run in this process, with one seed.
    """
    rows = _rows(names)
    results: dict[tuple[str, ...], dict[str, float]] = {}
    with ExitStack() as stack:
        if mutation is not None:
            stack.enter_context(MUTATIONS[mutation].applied(factor))
        plan = planned([row for row in rows if _can_be_built(row)], [0], [CONFIG_DIR])
        for key, work in plan.tasks().items():
            try:
                results[key] = result_of(work)
            except (ConfigError, ValueError):  # such as KV that no longer fits
                results[key] = {}
            except ZeroDivisionError:  # the other system meets its limits at no rate
                results[key] = {VALUE: math.inf}
        return {row.name: plan.interval(row, results).mean for row in rows}


def findings(
    names: Sequence[str], jobs: int, most: float = FACTORS[-1], mutations: Sequence[str] = tuple(MUTATIONS)
) -> list[Finding]:
    """Returns what mutations do to the rows, as far as they move them.

    most: largest factor that is tried; rows that a factor of 1.1 leaves in their bands are tried with the
    next one by the mutation that moves them most.
    """
    context = get_context("spawn")  # nothing of an earlier mutation may be cached
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context, max_tasks_per_child=1) as pool:
        cases = [None, *mutations]
        ours, *changed = pool.map(figures_under, cases, [FACTORS[0]] * len(cases), [list(names)] * len(cases))
        moves = {
            (row.name, name): found[row.name] / ours[row.name] - 1
            for name, found in zip(mutations, changed, strict=True)
            for row in _rows(names)
        }
        fallen = {place: FACTORS[0] for place in moves if not _holds(place[0], ours, moves[place])}
        tried = dict.fromkeys(moves, FACTORS[0])
        strongest = {name: max(mutations, key=lambda mutation: _size(moves[name, mutation])) for name in ours}
        for factor in (f for f in FACTORS[1:] if f <= most):
            left: dict[str, list[str]] = {}
            for name, mutation in strongest.items():
                if not any(row == name for row, _ in fallen) and _is_met(name, ours[name]):
                    left.setdefault(mutation, []).append(name)
            again = pool.map(figures_under, left, [factor] * len(left), left.values())
            for mutation, found in zip(left, again, strict=True):
                for name, value in found.items():
                    tried[name, mutation] = factor
                    if not _is_met(name, value):
                        fallen[name, mutation] = factor
    return [
        Finding(row, mutation, change, fallen.get((row, mutation)), tried[row, mutation])
        for (row, mutation), change in moves.items()
        if _size(change) >= LEAST_MOVE or (row, mutation) in fallen
    ]


def write(found: Sequence[Finding]) -> None:
    """Writes `mutations.csv`: the findings, and the earlier ones on other rows and mutations."""
    places = {(finding.row, finding.mutation) for finding in found}
    kept = [old for lines in known().values() for old in lines if (old.row, old.mutation) not in places]
    known.cache_clear()
    order = {row.name: index for index, row in enumerate(_rows(()))}
    lines = sorted([*kept, *found], key=lambda finding: (order.get(finding.row, -1), finding.mutation))
    with FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(Finding._fields)
        for finding in lines:
            falls_at = "" if finding.falls_at is None else finding.falls_at
            out.writerow([finding.row, finding.mutation, f"{finding.change:.4f}", falls_at, finding.tried])


def _rows(names: Sequence[str]) -> list[Row]:
    return [row for family in chosen(names, FAMILIES) for row in family.rows]


def _can_be_built(row: Row) -> bool:
    """Returns whether the row's comparisons fit their devices."""
    try:
        planned([row], [0], [CONFIG_DIR])
    except ConfigError:
        return False
    return True


def _is_met(name: str, value: float) -> bool:
    (row,) = _rows([name])
    return Verdict(row=row, ours=mean_interval([value])).state is State.HOLDS


def _holds(name: str, ours: Mapping[str, float], change: float) -> bool:
    """Returns whether the row still holds, or did not before."""
    return not _is_met(name, ours[name]) or _is_met(name, ours[name] * (1 + change))


def _size(change: float) -> float:
    return math.inf if math.isnan(change) else abs(change)


def main() -> None:
    """Prints what the mutations do to the simulated rows, and keeps it."""
    parser = argparse.ArgumentParser(description="Which rows of the gallery a changed simulator breaks")
    parser.add_argument("names", nargs="*", help="families or rows; none: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", type=float, default=FACTORS[-1], help="largest factor that is tried")
    parser.add_argument("--mutations", nargs="+", choices=MUTATIONS, default=list(MUTATIONS))
    options = parser.parse_args()
    names = [row.name for row in _rows(options.names) if row.kind is Kind.SIMULATED]
    found = findings(names, options.jobs, options.most, options.mutations)
    write(found)
    for finding in found:
        falls = "" if finding.falls_at is None else f", falls out at {finding.falls_at:g}"
        print(f"{finding.row:24} {finding.mutation:15} {100 * finding.change:+7.1f} %{falls}")
    moved = {finding.row for finding in found}
    if unmoved := [name for name in names if name not in moved]:
        print(f"Moved by no mutation: {', '.join(unmoved)}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
