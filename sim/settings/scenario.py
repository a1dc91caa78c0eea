"""Builds the scenario of a composed config and runs it; every mistake of the user is a ConfigError."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from hwmodels.costs import EnergySettings
from hwmodels.device import Storage
from hwmodels.iterations import UnknownIterationError
from policies.parallelism import AsSet, LayoutPolicy
from policies.roles import Turns
from sim.cluster.attached import ProcessError, UserProcess
from sim.cluster.disaggregation import EncoderSettings
from sim.cluster.settings import SimSettings
from sim.metrics.dialects import MetricsSettings
from sim.metrics.result import RunResult
from sim.metrics.slo import Slo
from sim.settings.build import build, build_as, policy_errors
from sim.settings.errors import NOT_OF_A_SCENARIO, ONLY_WITH_SPECULATION, OPTIONAL, ConfigError
from sim.setup.deployment import Deployment
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario
from sim.transfer.kv_transfers import KvTransferSettings
from sim.workload.base import Source

NEEDED = (*OPTIONAL, "storage", "pools", "kv_transfer", "sim", "energy", "metrics")
"""Keys of a whole config that are read before its scenario is built; the others are the scenario's fields."""


def build_scenario(cfg: Mapping[Any, Any], objects: Mapping[str, Any] = MappingProxyType({})) -> Scenario:
    """Builds the scenario without checking that the model fits its devices. Raises ConfigError.

    cfg: the whole config, with interpolations resolved. objects: root key -> the object that
    replaces its node.
    """
    if not isinstance(cfg, Mapping):
        raise ConfigError(f"the config must be a mapping of settings, is a {type(cfg).__name__}")
    for key in NEEDED:
        if key not in cfg:
            raise ConfigError(
                f"{key}: must be given, as in the config.yaml of a run, which is a whole config"
            )
    settings: dict[str, Any] = {str(key): cfg[key] for key in cfg if key not in NOT_OF_A_SCENARIO}
    settings |= {key: cfg[key] or None for key in OPTIONAL}
    settings |= _unused(objects.get("speculation", cfg["speculation"]))
    settings["storage"] = build_as(Storage, cfg["storage"], "storage")
    settings["pools"] = {name: _build_pool(node, f"pools.{name}") for name, node in cfg["pools"].items()}
    settings["kv_transfer"] = build_as(KvTransferSettings, cfg["kv_transfer"], "kv_transfer")
    settings["encoders"] = build_as(EncoderSettings, cfg.get("encoders") or {}, "encoders")
    settings["turns"] = build_as(Turns, cfg.get("turns") or {}, "turns")
    settings["sim"] = build_as(SimSettings, cfg["sim"], "sim")
    settings["energy"] = build_as(EnergySettings, cfg["energy"], "energy")
    settings["metrics"] = build_as(MetricsSettings, cfg["metrics"], "metrics")
    scenario: Scenario = build_as(Scenario, with_layout(settings | dict(objects)), "")
    if scenario.sim.thin == 1:
        return scenario
    from sim.setup.thinning import thinned  # noqa: PLC0415 (few fleets are thinned)

    try:
        return thinned(scenario)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_pool(cfg: Mapping[Any, Any], where: str) -> PoolSettings:
    settings: dict[str, Any] = {str(key): cfg[key] for key in cfg}
    settings |= {key: cfg[key] or None for key in OPTIONAL if key in cfg} | _unused(cfg["speculation"])
    settings["storage"] = build_as(Storage, cfg["storage"], f"{where}.storage")
    pool: PoolSettings = build_as(PoolSettings, with_layout(settings), where)
    return pool


def with_layout(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a deployment with `layout` replaced by the parallel sizes that it chooses.

    Raises ConfigError.
    """
    own = dict(settings)
    node = own.pop("layout", None)
    if node is None:
        return own
    policy: LayoutPolicy = build(node, "layout")
    if isinstance(policy, AsSet):
        return own
    from sim.setup.estimates import chosen_layout  # noqa: PLC0415 (few layouts are chosen)

    names = {field.name for field in fields(Deployment)}
    deployment = build_as(Deployment, {name: own[name] for name in own if name in names}, "")
    slo: Slo | None = build(own["slo"], "slo") if own.get("slo") else None
    try:
        choice = chosen_layout(policy, deployment, slo.request_limits_s if slo else None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {**own, **choice.sizes._asdict(), "layout_notes": list(choice.notes)}


def _unused(speculation: object) -> dict[str, None]:
    """Returns the groups that are not built if nothing drafts, as settings."""
    return {} if speculation else dict.fromkeys(ONLY_WITH_SPECULATION)


def build_run(
    cfg: Mapping[Any, Any], objects: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Scenario, Source]:
    """Builds the scenario and its traffic (for one run), and checks that the model fits its devices.

    objects: see `build_scenario`. Raises ConfigError.
    """
    scenario = build_scenario(cfg, objects)
    try:
        with policy_errors(scenario):
            for pool in scenario.pools_by_name.values():
                pool.plan_memory()
                pool.iteration_model()
            scenario.future()
            return scenario, scenario.source()
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error


def run(scenario: Scenario, source: Source, report: Callable[[float, int], None] | None = None) -> RunResult:
    """Simulates the scenario and computes its figures.

    report: called with the simulated seconds and the number of ended requests. Raises ConfigError: see
    `errors_of_user`, and KeyboardInterrupt if Ctrl-C or SIGTERM cut the run: it is no result of a study.
    """
    result = run_or_part(scenario, source, report)
    if result.records.interrupted:
        raise KeyboardInterrupt
    return result


def run_or_part(
    scenario: Scenario,
    source: Source,
    report: Callable[[float, int], None] | None = None,
    attach: Sequence[UserProcess] = (),
) -> RunResult:
    """Simulates as `run` does; returns what there is of a run that Ctrl-C cut, which its summary says.

    attach: processes of the user's, see `sim.cluster.attached`.
    """
    with errors_of_user(scenario):
        return scenario.run(source, report, attach)


@contextmanager
def errors_of_user(scenario: Scenario) -> Iterator[None]:
    """Raises ConfigError for mistakes of the user that only show during the run inside the context.

    These are an iteration for which the latency model has no time, and a policy that fails.
    """
    try:
        with policy_errors(scenario):
            yield
    except UnknownIterationError as error:
        raise ConfigError(f"latency: {error}") from error
    except ProcessError as error:
        raise ConfigError(str(error)) from error
