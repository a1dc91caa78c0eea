"""Applies the layout policy (`layout=`), which chooses the parallel sizes before a scenario is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from policies.parallelism import LayoutPolicy
from policies.parallelism.as_set import AsSet
from sim.metrics.slo import Slo
from sim.settings.build import build, build_as
from sim.settings.errors import ConfigError
from sim.setup.deployment import Deployment
from sim.setup.layout_choice import chosen_layout


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
    names = {field.name for field in fields(Deployment)}
    deployment = build_as(Deployment, {name: own[name] for name in own if name in names}, "")
    slo: Slo | None = build(own["slo"], "slo") if own.get("slo") else None
    try:
        choice = chosen_layout(policy, deployment, slo.request_limits_s if slo else None)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return {**own, **choice.sizes._asdict(), "layout_notes": list(choice.notes)}
