"""The LoRA adapters of a simulated fleet, which are loaded and unloaded while it serves.

An adapter is a name and a rank: no file is read. Its weights come to a GPU with the first request that names
it, as the adapter policy of the scenario says. An adapter that is loaded again has a name of its own in the
engines, so that requests in progress keep theirs, and KV is not shared with the old one.
"""

from __future__ import annotations

from experiments.serve.errors import ApiError
from experiments.serve.http.control import check_loaded_adapter, check_new_adapter
from policies.adapters.serving import Adapter
from sim.setup.scenario import Scenario

DEFAULT_RANK = 16
"""Rank of an adapter that names none; that of the slots, if the policy has slots."""
MAX_LOADS = 10_000
"""Adapters of one run; engines know those that were unloaded, too."""


class ServedAdapters:
    """The adapters of a fleet, at first those of the workload.

    in_engines: all adapters that engines know, by their own names; an engine that is created reads it.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.in_engines = list(scenario.served_adapters)
        self._pools = list(scenario.pools_by_name.values())
        self._own_names = {adapter.name: adapter.name for adapter in self.in_engines}

    @property
    def names(self) -> list[str]:
        """Names that requests may give now."""
        return list(self._own_names)

    @property
    def ranks(self) -> dict[str, int]:
        """Rank of each adapter by its name in the engines."""
        return {adapter.name: adapter.rank for adapter in self.in_engines}

    def own_name(self, name: str | None) -> str | None:
        """Returns the name of an adapter in the engines; None for the base model. Raises ApiError."""
        if name is None:
            return None
        check_loaded_adapter(name, self._own_names)
        return self._own_names[name]

    def number(self, own_name: str) -> int:
        """Returns the number of an adapter, from 1 in the order of loads, by its name in the engines."""
        return next(n for n, adapter in enumerate(self.in_engines, 1) if adapter.name == own_name)

    def load(self, name: str, rank: int | None, *, replaces: bool) -> Adapter:
        """Loads an adapter, and returns it as the engines must know it from now on.

        rank: None for the default. replaces: whether it may take the place of one with its name. Raises
        ApiError.
        """
        models = {pool.model.name for pool in self._pools}
        check_new_adapter(name, models, self._own_names, replaces=replaces)
        if any(pool.adapters is None for pool in self._pools):
            raise ApiError(
                "adapters=none: this server serves no LoRA adapters; start it with a policy, such as "
                "adapters=fixed_slots"
            )
        if len(self.in_engines) >= MAX_LOADS:
            raise ApiError(f"at most {MAX_LOADS} adapters are loaded in one run; start the server again")
        taken = {each.name for each in self.in_engines}
        own_name, number = name, 2
        while own_name in taken:
            own_name, number = f"{name}#{number}", number + 1
        adapter = Adapter(name=own_name, rank=rank or self._default_rank())
        for pool in self._pools:
            try:
                pool.check_served([*self.in_engines, adapter])
            except ValueError as error:
                raise ApiError(str(error), param="rank") from None
        self.in_engines.append(adapter)
        self._own_names[name] = own_name
        return adapter

    def unload(self, name: str) -> None:
        """Unloads an adapter; requests in progress keep it. Raises ApiError."""
        check_loaded_adapter(name, self._own_names)
        del self._own_names[name]

    def _default_rank(self) -> int:
        slots = [pool.adapters.slots for pool in self._pools if pool.adapters is not None]
        return min((rank for num_slots, rank in slots if num_slots), default=DEFAULT_RANK)
