"""Composes and builds the candidates of a search, and refuses those that cannot run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.override import not_about
from experiments.app.settings.variants import Variants
from experiments.capacity.probe import traffic
from experiments.capacity.settings import AS_SET, CapacitySettings, Entry
from experiments.study.settings import LAUNCHER, settings_of
from hwmodels.hf.quantization import IS_QUANTISED
from sim.cluster.simulation import check_fleet
from sim.metrics.slo import Slo
from sim.settings.build import shown
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_scenario
from sim.setup.scenario import Scenario
from sim.workload.base import BeginsByRate

NODE = "capacity"
SEARCHED = {"load": "capacity.headroom and capacity.growth_per_month", "replicas": "capacity.max_replicas"}
"""Settings that the search varies -> the settings that limit them."""
NONE = ("pools", "scaling", "failures")
"""Groups that must be none, because a candidate is a constant number of equal replicas."""
LENGTH_STEP = 256
"""Multiple of tokens to which the longest request is rounded up for `--max-model-len`."""
COMMON = ("seed", "prompt_scale", "output_scale")
"""Settings of the traffic, which must be the same for all candidates."""
UNSUPPORTED = "the GPU, the layout or the format is not supported"
TOO_LARGE = "the model does not fit in memory"
TRUNCATES = "requests would be truncated"
FORMAT_AXIS = "weights"
SIZES = ("hardware", "TP", "PP")
"""Axes whose entries a model may not allow; such a candidate is left out and is not an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Settings of one replica; the search finds how many such replicas are needed."""

    name: str
    parts: Mapping[str, str]
    """Axis -> the candidate's label on it."""
    overrides: tuple[str, ...]
    """Overrides of `simulate`, in addition to those of the command line."""
    scenario: Scenario
    """Scenario with least_up replicas."""
    asked: Mapping[str, str | None]
    """Formats that were set: weights, moe_weights, kv_cache_dtype, dtype, quantization_config; else None."""
    least_up: int = 1
    """Least number of replicas that its router needs; power_of_two compares two."""

    @property
    def usd_per_hour(self) -> float:
        """Price of one replica, in USD per hour."""
        return self.scenario.price_usd_per_hour

    @property
    def num_devices(self) -> int:
        """GPUs of one replica."""
        return self.scenario.layout.num_devices

    def deployed(self, num_up: int, settings: CapacitySettings) -> int:
        """Returns the replicas to rent so that num_up are running, with spares for failures."""
        with_spares = num_up + settings.spare
        if settings.availability is None:
            return with_spares
        from sim.cluster.availability import (  # noqa: PLC0415 (scipy.stats takes half a second)
            availability,
            replicas_for,
        )

        up_share = availability(settings.mtbf_hours * 3600 / self.num_devices, settings.mttr_hours * 3600)
        return max(with_spares, replicas_for(num_up, up_share, settings.availability, most=10 * num_up + 100))

    def most_up(self, settings: CapacitySettings) -> int:
        """Returns the most running replicas for which at most max_replicas are rented; 0 if not even one."""
        low, high = 0, settings.max_replicas - settings.spare
        while low < high:
            middle = (low + high + 1) // 2
            if self._is_allowed(middle, settings):
                low = middle
            else:
                high = middle - 1
        return low

    def _is_allowed(self, num_up: int, settings: CapacitySettings) -> bool:
        try:
            return self.deployed(num_up, settings) <= settings.max_replicas
        except ValueError:  # no number of spares reaches the availability
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Combination that cannot be built or does not fit in memory."""

    name: str
    parts: Mapping[str, str]
    reason: str
    kind: str
    """Short reason, the same for all combinations that it applies to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Settings of a search, and its candidates."""

    settings: CapacitySettings
    slo: Slo
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    base: tuple[str, ...]
    """Overrides of the command line, which all candidates have."""
    source: ConfigSource
    """Root config and config folders of `simulate`."""


def build_question(cfg: dict[str, Any], source: ConfigSource, overrides: Sequence[str]) -> Question:
    """Builds the candidates. overrides: all overrides of the command line.

    Raises ConfigError for a wrong setting, and if no candidate can be built.
    """
    settings = settings_of(CapacitySettings, cfg, NODE)
    simulate = ConfigSource(config_name="simulate", dirs=source.dirs)
    base = not_about(overrides, NODE, LAUNCHER)
    variants = Variants(simulate, base)
    whole = variants.config()
    _check_base(whole)
    candidates, refused = build_candidates(settings, variants)
    _check_any(candidates, refused)
    slo = candidates[0].scenario.slo
    assert slo is not None
    for candidate in candidates:
        for key in ("slo", "workload"):
            if getattr(candidate.scenario, key) != getattr(candidates[0].scenario, key):
                raise ConfigError(f"{NODE}.more: {candidate.name}: all candidates must have the same {key}")
    _check_demand(candidates, settings)
    set_length = resolved(whole)["engine"]["max_model_len"]
    candidates, clipping = _without_clipping(candidates, settings, set_length)
    refused += clipping
    _check_any(candidates, refused)
    if set_length is None:
        candidates, short = _for_longest(candidates, settings)
        refused += short
        _check_any(candidates, refused)
    return Question(
        settings=settings,
        slo=slo,
        candidates=tuple(candidates),
        refused=tuple(refused),
        base=tuple(base),
        source=simulate,
    )


def build_candidates(settings: CapacitySettings, variants: Variants) -> tuple[list[Candidate], list[Refused]]:
    """Builds all combinations; returns the candidates, and the combinations that cannot run.

    Raises ConfigError for an entry that cannot be built in any combination.
    """
    axes = settings.axes
    candidates, refused = list[Candidate](), list[Refused]()
    base = variants.config()
    built: set[str] = set()
    by_others: dict[tuple[str, ...], list[Scenario]] = {}
    errors: dict[str, str] = {}
    for combination in product(*axes.values()):
        entries = dict(zip(axes, combination, strict=True))
        name = name_of(entries, axes)
        parts = {axis: entry.label for axis, entry in entries.items()}
        own = tuple(override for entry in combination for override in entry.overrides)
        config = _composed(variants, combination, own, base)
        try:
            scenario, least_up = _built(config, settings)
        except ConfigError as error:
            for entry in combination:
                # A checkpoint that is quantised already has its own format; the list's others are left out.
                if IS_QUANTISED not in str(error):
                    errors.setdefault(entry.where, str(error))
            refused.append(Refused(name=name, parts=parts, reason=str(error), kind=UNSUPPORTED))
            continue
        built.update(entry.where for entry in combination)
        others = tuple(label for axis, label in parts.items() if axis != FORMAT_AXIS)
        if any(scenario == same for same in by_others.setdefault(others, [])):
            continue  # the checkpoint's own format again, under another name
        by_others[others].append(scenario)
        if refusal := _refusal(scenario):
            kind, reason = refusal
            refused.append(Refused(name=name, parts=parts, reason=reason, kind=kind))
            continue
        candidates.append(
            Candidate(
                name=name,
                parts=parts,
                overrides=own,
                scenario=scenario,
                asked=_asked_formats(config["model"]),
                least_up=least_up,
            )
        )
    for axis, entries_of_axis in axes.items():
        for entry in entries_of_axis:
            if axis not in SIZES and entry.where not in built and entry.where in errors:
                raise ConfigError(f"{NODE}.{entry.where}: {errors[entry.where]}")
    return candidates, refused


def _refusal(scenario: Scenario) -> tuple[str, str] | None:
    """Returns the kind and the reason why a scenario cannot run; None if it can."""
    for kind, check in ((TOO_LARGE, scenario.plan_memory), (UNSUPPORTED, scenario.iteration_model)):
        try:
            check()
        except ValueError as error:
            return kind, str(error)
    return None


def name_of(entries: Mapping[str, Entry], axes: Mapping[str, Sequence[Entry]]) -> str:
    """Returns the labels of all axes on which candidates differ."""
    varied = [entry.label for axis, entry in entries.items() if len(axes[axis]) > 1 or axis == "hardware"]
    return " ".join(filter(None, varied)) or AS_SET


def _asked_formats(model: Mapping[str, Any]) -> dict[str, str | None]:
    keys = ("weights", "moe_weights", "kv_cache_dtype", "dtype", "quantization_config")
    found = {key: model.get(key) for key in keys}
    return {key: None if value in (None, "auto") else str(value) for key, value in found.items()}


def _built(config: Mapping[str, Any], settings: CapacitySettings) -> tuple[Scenario, int]:
    """Builds the scenario with as few replicas as its router allows; returns it and that number.

    Raises ConfigError for a wrong setting.
    """
    plain = resolved(config)
    try:
        return build_scenario(plain), 1
    except ConfigError as error:
        if not str(error).startswith("routing."):
            raise
    most = build_scenario(plain, {"replicas": settings.max_replicas})
    least_up = next(n for n in range(1, settings.max_replicas + 1) if _can_route(most, n))
    return replace(most, replicas=least_up), least_up


def _can_route(scenario: Scenario, num_replicas: int) -> bool:
    try:
        check_fleet(scenario.routing, num_replicas)
    except ValueError:
        return False
    return True


def _composed(
    variants: Variants, combination: Sequence[Entry], own: Sequence[str], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Composes the config of a combination. Raises ConfigError, naming the entry that is wrong."""

    def checked(overrides: Sequence[str]) -> dict[str, Any]:
        config = variants.config(overrides)
        _check_base(config)
        for key in COMMON:
            if config[key] != base[key]:
                raise ConfigError(
                    f"{key}={shown(config[key])}: all candidates must have the same {key}, "
                    f"{shown(base[key])}; set it for the whole search"
                )
        return config

    try:
        return checked(own)
    except ConfigError as error:
        for entry in combination:
            try:
                checked(entry.overrides)
            except ConfigError as alone:
                raise ConfigError(f"{NODE}.{entry.where}: {alone}") from alone
        raise ConfigError(f"{NODE}: {' '.join(own)}: {error}") from error


def _check_any(candidates: Sequence[Candidate], refused: Sequence[Refused]) -> None:
    """Raises ConfigError if there is no candidate."""
    if not candidates:
        reasons = "; ".join(f"{one.name or 'as set'}: {one.reason}" for one in refused[:2])
        raise ConfigError(f"{NODE}: no candidate can be built ({reasons})")


def _without_clipping(
    candidates: Sequence[Candidate], settings: CapacitySettings, set_length: int | None
) -> tuple[list[Candidate], list[Refused]]:
    """Refuses candidates that truncate more requests than others; set_length: engine.max_model_len as set.

    A candidate with a shorter context length truncates requests, and would look cheaper for doing less work.
    """
    scenarios = [candidate.scenario for candidate in candidates]
    whole_length = set_length or max(scenario.model.max_position_embeddings for scenario in scenarios)
    if all(scenario.max_model_len >= whole_length for scenario in scenarios):
        return list(candidates), []
    whole = max(scenarios, key=lambda one: one.model.max_position_embeddings)
    whole = replace(whole, engine=replace(whole.engine, max_model_len=whole_length))
    kept, refused = list[Candidate](), list[Refused]()
    for candidate in candidates:
        length = candidate.scenario.max_model_len
        key = "model.max_position_embeddings"
        key = key if candidate.scenario.engine.max_model_len is None else "engine.max_model_len"
        for seed in settings.seeds if length < whole_length else ():
            own, all_of_it = (_num_clipped(one, seed) for one in (candidate.scenario, whole))
            if own > all_of_it:
                reason = (
                    f"{key}={length}: truncates {own:,} requests of seed {seed} ({all_of_it:,} with "
                    f"{whole_length:,}), so it would serve fewer tokens than the others"
                )
                refused.append(
                    Refused(name=candidate.name, parts=candidate.parts, reason=reason, kind=TRUNCATES)
                )
                break
        else:
            kept.append(candidate)
    return kept, refused


def _for_longest(
    candidates: Sequence[Candidate], settings: CapacitySettings
) -> tuple[list[Candidate], list[Refused]]:
    """Gives each candidate the engine.max_model_len of the longest request, and refuses what cannot hold it.

    An engine does not start if its KV memory does not hold one sequence of that length.
    """
    kept, refused = list[Candidate](), list[Refused]()
    for candidate in candidates:
        scenario = candidate.scenario
        if scenario.engine.max_model_len is None:
            length = longest_request(scenario, settings.seeds)
            scenario = replace(scenario, engine=replace(scenario.engine, max_model_len=length))
        if refusal := _refusal(scenario):
            kind, reason = refusal
            refused.append(Refused(name=candidate.name, parts=candidate.parts, reason=reason, kind=kind))
        else:
            kept.append(replace(candidate, scenario=scenario))
    return kept, refused


def longest_request(scenario: Scenario, seeds: Sequence[int]) -> int:
    """Returns the tokens of the longest request of any seed, rounded up to `LENGTH_STEP`.

    It is at most the context of the model, to which longer requests are cut. Raises ConfigError.
    """
    longest = 2
    for seed in seeds:
        try:
            source = traffic(scenario, seed, None)[0]
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from error
        for arrival in source.listed:
            longest = max(longest, arrival.request.prompt.num_tokens + arrival.num_output_tokens)
    return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, scenario.model.max_position_embeddings)


def _num_clipped(scenario: Scenario, seed: int) -> int:
    try:
        return traffic(scenario, seed, None)[0].notes.num_clipped
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def _check_demand(candidates: Sequence[Candidate], settings: CapacitySettings) -> None:
    """Raises ConfigError for traffic without a request rate, and for more spares than max_replicas allows."""
    try:
        source = candidates[0].scenario.source()
        rented = min(candidate.deployed(1, settings) for candidate in candidates)
    except (ValueError, OSError) as error:
        where = f"{NODE}." if str(error).startswith("wanted_share") else ""
        raise ConfigError(f"{where}{str(error).replace('wanted_share', 'availability', 1)}") from error
    if rented > settings.max_replicas:
        raise ConfigError(
            f"{NODE}.availability={settings.availability}: needs {rented:,} replicas to keep one running; "
            f"must be <= max_replicas={settings.max_replicas:,}"
        )
    begins_s = source.last_begin_s if isinstance(source, BeginsByRate) else None
    if begins_s is not None and settings.window_s is not None and begins_s >= settings.window_s:
        raise ConfigError(
            f"{NODE}.window_s={settings.window_s:g}: sessions, of which the last begins at "
            f"{begins_s:.4g} s, cannot be planned for a part of their time; set "
            f"{NODE}.window_s=null, or simulate fewer of them"
        )
    if not source.num_requests or not (source.last_arrival_s or begins_s):
        raise ConfigError(
            "workload: its arrivals are a closed loop or come all at once, so that any number of replicas is "
            "enough; choose an open loop, such as workload=poisson"
        )


def _check_base(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for settings that the search varies, and for fleets that it cannot plan."""
    if not config["slo"]:
        raise ConfigError("slo=none: capacity is planned for an SLO; choose one, such as slo=chat")
    for key, where in SEARCHED.items():
        if config[key] != 1:
            raise ConfigError(f"{key}={shown(config[key])}: capacity varies it; leave it at 1, see {where}")
    for key in NONE:
        node = config[key]
        is_none = not node or (key == "failures" and not node.get("events"))
        if not is_none:
            raise ConfigError(f"{key}: must be none; capacity plans equal replicas that are always running")
    if not str(config["layout"].get("_target_", "")).endswith("AsSet"):
        raise ConfigError("layout: must be as_set; list the sizes to try in capacity.tensor_parallel_sizes")
