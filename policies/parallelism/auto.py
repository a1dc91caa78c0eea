"""Automatic layout: estimates all sensible layouts on the given GPUs, and chooses the best for an objective.

The search follows AlpaServe (OSDI 2023), DistServe (OSDI 2024) and Vidur-Search (MLSys 2024), with
closed-form estimates instead of simulated runs. All requests are equal, and n of them are served
concurrently:

    TPOT                decode_s(n) + (n - 1) prompt_s / output      with the prefills of the other requests
    requests per second n / (n prompt_s + output decode_s(n))

These layouts are estimated: tensor parallelism inside a node; attention data parallelism for mixtures of
experts and for MLA, where tensor parallel ranks would have copies of the KV; context parallelism if each GPU
gets at least MIN_RING_TOKENS of a prompt; experts split like the other matrices or distributed unsplit (with
attention data parallelism always unsplit); every tensor parallel layout with and without sequence
parallelism, in which a reduce-scatter and an all-gather replace an all-reduce (Korthikanti et al., MLSys
2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple

from fieldlimits import Checked, PositiveInt
from policies.parallelism import ALONE, Estimate, Facts, Figures, LayoutChoice, Load, Sizes

MIN_RING_TOKENS = 2048
"""Minimum prompt tokens per GPU with context parallelism; with fewer, GPUs wait for the ring's messages."""


class Objective(Enum):
    """Quantity that the layout maximises (throughput) or minimises, with its unit for messages."""

    latency = "seconds per request"
    throughput = "output tokens/s"
    cost = "$ per million output tokens"
    slo = "GPUs within the SLO"


class Candidate(NamedTuple):
    """A layout that fits into memory."""

    score: float
    """Value of the objective; smaller is better."""
    sizes: Sizes
    figures: Figures
    num_seqs: int
    """Number of concurrent sequences at which the objective is evaluated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Auto(Checked):
    """Best layout by objective; ties go to the fewest GPUs, then to the least pipeline parallelism."""

    devices: PositiveInt = 8
    """GPUs of one replica: all of them for latency and throughput, at most this number for cost and slo."""
    objective: Objective = Objective.latency
    prompt_tokens: PositiveInt = 1024
    """Prompt tokens of the requests for which layouts are evaluated."""
    output_tokens: PositiveInt = 256
    """Output tokens of these requests."""
    num_seqs: PositiveInt = 1
    """Minimum number of concurrent sequences."""

    def choose(self, facts: Facts, estimate: Estimate) -> LayoutChoice:
        """Returns the best layout. Raises ValueError if no layout fits in memory, or none meets the SLO."""
        if facts.given != ALONE:
            alone = ALONE._asdict()
            wrong = next(name for name, size in facts.given._asdict().items() if size != alone[name])
            raise ValueError(
                f"{wrong}={getattr(facts.given, wrong)}: layout=auto chooses it; leave it at "
                f"{alone[wrong]}, or set layout=as_set"
            )
        if self.objective is Objective.slo and not facts.limits_s:
            raise ValueError(
                "layout.objective=slo: the run has no SLO; set one such as slo=chat, or another objective"
            )
        load, found, refused = (
            Load(self.prompt_tokens, self.output_tokens),
            list[Candidate](),
            dict[Sizes, str](),
        )
        for sizes in self._feasible_sizes(facts):
            try:
                found.append(self._candidate(sizes, estimate(sizes, load), facts))
            except ValueError as error:
                refused[sizes] = str(error)
        if not found:
            reasons = "; ".join(f"{sizes}: {why}" for sizes, why in list(refused.items())[-3:])
            raise ValueError(
                f"layout.devices={self.devices}: no layout of {facts.model} "
                f"({facts.weight_bytes / 1e9:.1f} GB of weights) fits {facts.gpu} "
                f"({facts.gpu_memory_bytes / 1e9:.1f} GB each): {reasons}"
            )
        found.sort(key=lambda c: (c.score, c.sizes.num_devices, c.sizes.pipeline_parallel_size, c.sizes))
        if found[0].score == inf:
            raise ValueError(self._none_meets(facts, found))
        return LayoutChoice(found[0].sizes, tuple(self._notes(facts, found, refused)))

    def _feasible_sizes(self, facts: Facts) -> Iterator[Sizes]:
        uses_fewer = self.objective in (Objective.cost, Objective.slo)
        for total in range(1, self.devices + 1) if uses_fewer else [self.devices]:
            for tensor in divisors(total):
                for pipeline in divisors(total // tensor):
                    for context in divisors(total // tensor // pipeline):
                        data = total // tensor // pipeline // context
                        for sizes in self._with_experts(Sizes(tensor, pipeline, context, data), facts):
                            yield sizes
                            if tensor > 1:
                                yield sizes._replace(sequence_parallel=True)

    def _with_experts(self, sizes: Sizes, facts: Facts) -> Iterator[Sizes]:
        tensor, _, context, data, *_ = sizes
        if tensor > facts.gpus_per_node or context * MIN_RING_TOKENS > max(
            self.prompt_tokens, MIN_RING_TOKENS
        ):
            return
        if data > 1 and not (facts.num_experts or facts.shares_kv):
            return
        stage = tensor * context * data
        if data == 1 or not facts.num_experts:
            yield sizes
        if facts.num_experts and stage > 1:
            yield sizes._replace(expert_parallel_size=stage)

    def _candidate(self, sizes: Sizes, figures: Figures, facts: Facts) -> Candidate:
        if figures.max_num_seqs < self.num_seqs:
            raise ValueError(
                f"layout.num_seqs={self.num_seqs}: memory and slots suffice for {figures.max_num_seqs} "
                f"concurrent sequences of {self.prompt_tokens + self.output_tokens} tokens"
            )
        most = figures.max_num_seqs
        match self.objective:
            case Objective.latency:
                score = figures.prefill_s + self.output_tokens * self._tpot_s(figures, self.num_seqs)
                return Candidate(score, sizes, figures, self.num_seqs)
            case Objective.throughput:
                return Candidate(-self._tokens_per_s(figures, most), sizes, figures, most)
            case Objective.cost:
                return Candidate(self._usd_per_mtok(figures, most), sizes, figures, most)
            case Objective.slo:
                num_seqs = self._most_within(figures, facts)
                score = inf if num_seqs < self.num_seqs else float(sizes.num_devices)
                if score < inf:  # for each GPU count, the layout that serves the most
                    score -= 1 - 1 / (1 + self._tokens_per_s(figures, num_seqs))
                return Candidate(score, sizes, figures, max(num_seqs, self.num_seqs))

    def _tpot_s(self, figures: Figures, num_seqs: int) -> float:
        between_s = (num_seqs - 1) * figures.prompt_s / self.output_tokens
        return figures.decode_s(num_seqs) + between_s

    def _tokens_per_s(self, figures: Figures, num_seqs: int) -> float:
        seconds = num_seqs * figures.prompt_s + self.output_tokens * figures.decode_s(num_seqs)
        return num_seqs * self.output_tokens / seconds

    def _usd_per_mtok(self, figures: Figures, num_seqs: int) -> float:
        return figures.usd_per_hour / 3600 / self._tokens_per_s(figures, num_seqs) * 1e6

    def _meets(self, figures: Figures, num_seqs: int, facts: Facts) -> bool:
        tpot_s = self._tpot_s(figures, num_seqs)
        values = {
            "ttft": figures.prefill_s,
            "tpot": tpot_s,
            "e2e": figures.prefill_s + self.output_tokens * tpot_s,
        }
        return all(values[term] <= limit_s for term, limit_s in facts.limits_s.items())

    def _most_within(self, figures: Figures, facts: Facts) -> int:
        """Returns the maximum number of concurrent sequences within the SLO, by bisection; 0: none."""
        low, high = 0, figures.max_num_seqs
        while low < high:
            middle = (low + high + 1) // 2
            if self._meets(figures, middle, facts):
                low = middle
            else:
                high = middle - 1
        return low

    def _described(self, found: Candidate) -> str:
        figures, num_seqs = found.figures, found.num_seqs
        match self.objective:
            case Objective.latency:
                return f"{found.score:.3g} s"
            case Objective.throughput:
                return f"{self._tokens_per_s(figures, num_seqs):,.0f} tokens/s with {_sequences(num_seqs)}"
            case Objective.cost:
                return f"${found.score:.3g} per million output tokens with {_sequences(num_seqs)}"
            case Objective.slo:
                num_gpus = found.sizes.num_devices
                return (
                    f"{num_gpus} GPU{'s' * (num_gpus != 1)} with {_sequences(num_seqs)}: TTFT "
                    f"{figures.prefill_s * 1e3:,.0f} ms, "
                    f"TPOT {self._tpot_s(figures, num_seqs) * 1e3:,.1f} ms"
                )

    def _notes(self, facts: Facts, found: list[Candidate], refused: dict[Sizes, str]) -> Iterator[str]:
        best, *others = found
        lengths = f"{self.prompt_tokens:,} prompt and {self.output_tokens:,} output tokens"
        yield (
            f"layout=auto: {best.sizes} is the best of {len(found)} layouts for {self.objective.name} "
            f"({self.objective.value}; {lengths}): {self._described(best)}."
        )
        shares = [f"{name} {100 * share:.0f} %" for name, share in best.figures.bounds(best.num_seqs).items()]
        sequences = f"{best.num_seqs} sequence{'s' * (best.num_seqs != 1)}"
        yield f"layout=auto: a decode iteration of {sequences} is bound by {', '.join(shares[:3])}."
        twin = best.sizes._replace(sequence_parallel=not best.sizes.sequence_parallel)
        different = [other for other in others if other.sizes != twin]
        if different:
            yield f"layout=auto: the runner-up is {different[0].sizes}: {self._described(different[0])}."
        for other in others:
            if other.sizes == twin:
                with_or_without = "with" if twin.sequence_parallel else "without"
                yield (
                    f"layout=auto: the same layout {with_or_without} sequence parallelism (a reduce-scatter "
                    f"and an all-gather replace each all-reduce, norms are split over tokens) is not better: "
                    f"{self._described(other)}."
                )
        if refused:
            sizes, why = next(iter(refused.items()))
            yield f"layout=auto: {len(refused)} layouts were not possible, such as {sizes}: {why}."

    def _none_meets(self, facts: Facts, found: list[Candidate]) -> str:
        limits = ", ".join(f"{term} {limit_s * 1e3:g} ms" for term, limit_s in facts.limits_s.items())
        nearest = min(found, key=lambda c: self._tpot_s(c.figures, self.num_seqs) + c.figures.prefill_s)
        return (
            f"layout.objective=slo: no layout of up to {self.devices} {facts.gpu} meets {limits} with "
            f"{_sequences(self.num_seqs)}; the nearest is {nearest.sizes}: {self._described(nearest)}"
        )


def _sequences(number: int) -> str:
    return f"{number} concurrent sequence{'s' * (number != 1)}"


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number, in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]
