"""Changes quantities of the simulator by a tenth, and finds which rows of the gallery that moves or breaks.

    python -m experiments.reproduce.mutations                       # all rows; half an hour on one core
    python -m experiments.reproduce.mutations decoding awq_speed    # families or rows by name

A row that holds whatever the simulator does says nothing about it. Each of `MUTATIONS` therefore makes one
quantity a tenth worse, and a tenth better for the rows that still hold. The figures are kept in
`mutations.csv`, from which the gallery prints what breaks a row, and tests check the kind that it states:

    row, mutation   one line for every mutation that moves the row by `LEAST_MOVE`
    ours            without a mutation
    worse, better   with it; nan: the settings no longer run; inf: a ratio to nothing; empty: not needed

Bands are not kept, so that a change of them needs no run. Values change in memory, in a process of its own
for every mutation; no file does.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.papers import distserve_prices, splitwise_prices
from experiments.papers.speculation import speedup
from experiments.reproduce.claims import FAMILIES, decoding, speculation
from experiments.reproduce.command import chosen
from experiments.reproduce.findings import FILE, LEAST_MOVE, Finding, known
from experiments.reproduce.rows import Row
from experiments.reproduce.tasks import VALUE, planned, result_of
from hwmodels.costs import Tariff
from hwmodels.device import Device
from hwmodels.host import HostShare
from hwmodels.model.attention import GroupedQueryAttention, LatentAttention
from hwmodels.operators import Calibration
from hwmodels.operators.attention import HeadLayout
from hwmodels.operators.mla import MlaHeads
from sim.settings import build as building
from sim.settings.errors import ConfigError
from sim.speculation.acceptance import rates
from sim.speculation.acceptance.rates import uniforms

WORSE, BETTER = 1.1, 1 / 1.1
SEEDS = (0, 1, 2)
"""Those of `windtunnel reproduce`."""

Patch = tuple[Any, str, Any]
"""An object, the name of its attribute, and what replaces it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """A change of one kind of figure: for the worse by a factor above 1, for the better by one below."""

    what: str
    """The figure, in a few words."""
    patches: Callable[[float], list[Patch]]
    of: type = object
    """The objects that hold the figure: a patched function that returns others does not use it."""

    @contextmanager
    def applied(self, factor: float) -> Iterator[None]:
        """Applies the change inside of the context. Objects that were built before keep their figures."""
        with ExitStack() as stack:
            for target, name, value in self.patches(factor):
                stack.enter_context(patch.object(target, name, value))
            yield

    @contextmanager
    def watched(self, note: Callable[[], None]) -> Iterator[None]:
        """Changes nothing inside of the context, and calls `note` when the figure is used."""

        def noting(change: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **more: Any) -> Any:
                found = change(*args, **more)
                if isinstance(found, self.of):
                    note()
                return found

            return noted

        with ExitStack() as stack:
            for target, name, value in self.patches(1.0):
                is_property = isinstance(value, property)
                watcher = property(noting(value.fget)) if is_property else noting(value)
                stack.enter_context(patch.object(target, name, watcher))
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
    bill_usd = Tariff.bill_usd

    def dearer(self: Tariff, **tokens: float) -> float:
        cut = {
            name: min(1.0, factor * getattr(self, name))
            for name in ("batch_factor", "read_factor")
            if getattr(self, name) < 1
        }
        return bill_usd(replace(self, **cut), **tokens)

    return [(Tariff, "bill_usd", dearer)]


def _measured_times(factor: float) -> list[Patch]:
    owners = (distserve_prices.ProfiledModel, splitwise_prices.TimedModel)
    return [_scaled(owner, "seconds", factor) for owner in owners]


MUTATIONS: Mapping[str, Mutation] = {
    "bandwidth": Mutation(what="memory bandwidth of every device, divided", patches=_bandwidth, of=Device),
    "compute": Mutation(what="peak FLOP/s of every device, divided", patches=_compute, of=Device),
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
    """Returns ours of rows under a mutation, by name, as `windtunnel reproduce` does with `SEEDS`.

    It is NaN for a row whose settings no longer run, and infinite for a ratio to nothing.
    mutation: None for none. All tasks run in this process.
    """
    with ExitStack() as stack:
        if mutation is not None:
            stack.enter_context(MUTATIONS[mutation].applied(factor))
        return {row.name: _ours(row) for row in _rows(names)}


def figures_and_uses(names: Sequence[str]) -> dict[str, tuple[float, set[str]]]:
    """Returns ours of rows without a mutation, and the mutations whose figures each of them used, by name."""
    found = {}
    for row in _rows(names):
        used: set[str] = set()
        with ExitStack() as stack:
            for name, mutation in MUTATIONS.items():
                stack.enter_context(mutation.watched(partial(used.add, name)))
            found[row.name] = _ours(row), used
    return found


def _ours(row: Row) -> float:
    results: dict[tuple[str, ...], dict[str, float]] = {}
    try:
        plan = planned([row], SEEDS, [CONFIG_DIR])
    except ConfigError:  # such as KV that no longer fits
        return math.nan
    for key, work in plan.tasks().items():
        try:
            results[key] = result_of(work)
        except (ConfigError, ValueError):
            results[key] = {}
        except ZeroDivisionError:  # the other system meets its limits at no rate
            results[key] = {VALUE: math.inf}
    return plan.interval(row, results).mean


def findings(names: Sequence[str], jobs: int, mutations: Collection[str] = tuple(MUTATIONS)) -> list[Finding]:
    """Returns what mutations do to the rows, as far as they move them; see `findings_by_mutation`."""
    return [line for _, found in findings_by_mutation(names, jobs, mutations) for line in found]


def findings_by_mutation(
    names: Sequence[str], jobs: int, mutations: Collection[str]
) -> Iterator[tuple[str, list[Finding]]]:
    """Yields what each mutation does to the rows, as soon as it is known.

    A row that does not use the figures that a mutation changes is not run with it. jobs: mutations at a time.
    """
    rows = {row.name: row for row in _rows(names)}
    context = get_context("spawn")  # nothing of an earlier mutation may be cached
    with (
        ProcessPoolExecutor(max_workers=jobs, mp_context=context, max_tasks_per_child=1) as pool,
        ThreadPoolExecutor(max_workers=jobs) as threads,
    ):
        # Each in a process of its own: figures that another row has put into a cache are used unnoticed.
        tasks = [pool.submit(figures_and_uses, [row]) for row in rows]
        plain = {name: found for task in tasks for name, found in task.result().items()}

        def changed(mutation: str, factor: float, some: list[str]) -> dict[str, float]:
            return pool.submit(figures_under, mutation, factor, some).result() if some else {}

        def found(mutation: str) -> list[Finding]:
            worse = changed(mutation, WORSE, [row for row, (_, used) in plain.items() if mutation in used])
            holding = [
                row
                for row, ours in worse.items()
                if rows[row].holds(plain[row][0])
                and rows[row].holds(ours)
                and ours != plain[row][0]  # then it does not depend on it
            ]
            better = changed(mutation, BETTER, holding)
            lines = [
                Finding(row, mutation, plain[row][0], ours, better.get(row)) for row, ours in worse.items()
            ]
            return [line for line in lines if line.most >= LEAST_MOVE]

        yield from zip(mutations, threads.map(found, mutations), strict=True)


def write(found: Sequence[Finding], names: Collection[str], mutations: Collection[str]) -> None:
    """Writes `mutations.csv`: the findings on these rows and mutations, and the earlier ones on others."""
    order = {row.name: index for index, row in enumerate(_rows(()))}
    kept = [
        old
        for lines in known().values()
        for old in lines
        if old.row in order and not (old.row in names and old.mutation in mutations)
    ]
    known.cache_clear()
    with FILE.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(Finding._fields)
        for line in sorted([*kept, *found], key=lambda finding: (order[finding.row], finding.mutation)):
            values = ("" if value is None else f"{value:.6g}" for value in line[2:])
            out.writerow([line.row, line.mutation, *values])


def _rows(names: Sequence[str]) -> list[Row]:
    return [row for family in chosen(names, FAMILIES) for row in family.rows]


def main() -> None:
    """Prints what the mutations do to the rows, and keeps it."""
    parser = argparse.ArgumentParser(description="Which rows of the gallery a changed simulator breaks")
    parser.add_argument("names", nargs="*", help="families or rows; none: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--mutations", nargs="+", choices=MUTATIONS, default=list(MUTATIONS))
    options = parser.parse_args()
    rows = {row.name: row for row in _rows(options.names)}
    moved = set()
    for mutation, found in findings_by_mutation(list(rows), options.jobs, options.mutations):
        write(found, rows.keys(), [mutation])  # what is found is kept if the run is cut
        for line in found:
            broken = ", falls out" if line.breaks(rows[line.row]) else ""
            print(f"{line.row:24} {line.mutation:15} {line.change_text}{broken}", flush=True)
            moved.add(line.row)
    if unmoved := rows.keys() - moved:
        print(f"Moved by none of them: {', '.join(name for name in rows if name in unmoved)}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
