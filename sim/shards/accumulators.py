"""The accumulators of a shard as bytes, which can be read without executing their content."""

from __future__ import annotations

import pickle  # nosec B403
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from numpy.typing import NDArray

from sim.records.table import Table
from sim.shards.shard_file import DamagedShardError

METRICS = "sim.metrics."
ALLOWED = {
    ("sim.shards.accumulators", "table_of"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "scalar"),
}
"""Classes of accumulators and of numpy's arrays; apart from them only classes of `METRICS` are read."""

T = TypeVar("T")


def table_of(columns: Mapping[str, NDArray[Any]]) -> Table:
    """Returns a table of numbers."""
    return Table(columns)


class _Writer(pickle.Pickler):
    """Writes an accumulator, with tables as columns of numbers."""

    def reducer_override(self, obj: Any) -> Any:
        """Returns the recipe that recreates a table."""
        if isinstance(obj, Table):
            return table_of, ({name: obj[name] for name in obj},)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Reads an accumulator; accepts only the classes of which accumulators consist."""

    def __init__(self, content: BytesIO, own: Sequence[type]) -> None:
        super().__init__(content)
        self._own = {(one.__module__, one.__qualname__) for one in own}

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Returns a class of accumulators or arrays. Raises DamagedShardError for any other."""
        if (module_name, global_name) in ALLOWED:
            return super().find_class(module_name, global_name)
        if (module_name, global_name) in self._own:
            return super().find_class(module_name, global_name)
        if module_name.startswith(METRICS):
            found = super().find_class(module_name, global_name)
            # A module also contains its imports, such as all of numpy under the name `np`.
            if isinstance(found, type) and (found.__module__, found.__qualname__) == (
                module_name,
                global_name,
            ):
                return found
        raise DamagedShardError(f"{module_name}.{global_name} is no part of an accumulator")


def accumulator_bytes(accumulator: object) -> bytes:
    """Returns the content of an accumulator; without its setting."""
    content = BytesIO()
    _Writer(content, protocol=5).dump(accumulator)
    return content.getvalue()


def read_accumulator(content: bytes, kind: type[T], own: Sequence[type] = ()) -> T:
    """Returns the accumulator that `accumulator_bytes` was given. Raises DamagedShardError.

    own: classes of user-defined metrics, which are also read.
    """
    try:
        found = _Reader(BytesIO(content), own).load()
    except Exception as error:  # damaged bytes can raise any error, such as ImportError or OverflowError
        raise DamagedShardError(str(error)) from error
    if not isinstance(found, kind):
        raise DamagedShardError(f"it is no {kind.__name__}")
    return found
