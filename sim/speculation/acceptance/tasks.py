"""The task of a request, for tables of acceptance by task."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from policies.core.request import Request
from sim.speculation import STREAM
from sim.workload.modified import draw


def require_tasks(task: str | None, tasks: Mapping[str, str], known: Collection[str], where: str) -> None:
    """Raises ValueError if a setting names a task that a table does not have. where: the table."""
    named = {f"tasks.{tenant}": name for tenant, name in tasks.items()}
    if task is not None:
        named["task"] = task
    missing = {setting: name for setting, name in named.items() if name not in known}
    if missing:
        setting, name = next(iter(missing.items()))
        absent = ", ".join(sorted(set(missing.values())))
        raise ValueError(f"{setting}={name}: {where} has no task {absent}; it has {', '.join(sorted(known))}")


def task_of(
    request: Request, seed: int, task: str | None, tasks: Mapping[str, str], known: tuple[str, ...]
) -> str:
    """Returns the task of a request: that of its tenant, else `task`, else one drawn of all, equally likely.

    All requests of a session have the same task.
    """
    if request.tenant in tasks:
        return tasks[request.tenant]
    if task is not None:
        return task
    return known[int(draw(seed, f"{STREAM}/tasks", request) * len(known))]
