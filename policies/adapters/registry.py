"""The adapters that an engine serves: their names, ranks and base models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from fieldlimits import Checked, MinLen, PositiveInt
from policies.core.limits import RejectedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(Checked):
    """A LoRA adapter on every matrix of attention and dense MLPs."""

    name: Annotated[str, MinLen(1), "because requests name the adapter"]
    rank: PositiveInt
    base_model: str | None = None
    """Model that the adapter was trained for; None: the served model."""


class AdapterMemory(NamedTuple):
    """Memory of adapters, over all GPUs of a replica."""

    bytes_per_rank: float = 0.0  # bytes of all matrices of an adapter, divided by its rank
    block_bytes: float = 0.0  # bytes of a KV block


class Registry:
    """The adapters that an engine serves, by name.

    Raises ValueError if two adapters have the same name, or if one was trained for another model.
    """

    def __init__(
        self, adapters: Iterable[Adapter], base_model: str, memory: AdapterMemory | None = None
    ) -> None:
        self.base_model = base_model
        self.memory = memory or AdapterMemory()
        self._adapters: dict[str, Adapter] = {}
        for adapter in adapters:
            self.add(adapter)

    def add(self, adapter: Adapter) -> None:
        """Adds an adapter. Raises ValueError as the class does."""
        if adapter.name in self._adapters:
            raise ValueError(f"adapters: the name {adapter.name} occurs twice; give each its own name")
        if adapter.base_model not in (None, self.base_model):
            raise ValueError(
                f"adapters: {adapter.name} has base_model={adapter.base_model}: must be {self.base_model}, "
                "the served model; remove the adapter, or serve its model"
            )
        self._adapters[adapter.name] = adapter

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All adapters, in the order given."""
        return tuple(self._adapters.values())

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 without adapters."""
        return max((adapter.rank for adapter in self._adapters.values()), default=0)

    def find(self, name: str) -> Adapter:
        """Returns the adapter with this name. Raises RejectedError if there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            few = ", ".join(list(self._adapters)[:5]) or "none"
            more = f" and {len(self) - 5} more" if len(self) > 5 else ""
            raise RejectedError(f"adapter={name}: must be one of the served adapters: {few}{more}")
        return adapter

    def num_bytes(self, name: str) -> float:
        """Returns the bytes of an adapter, over all GPUs."""
        return self._adapters[name].rank * self.memory.bytes_per_rank
