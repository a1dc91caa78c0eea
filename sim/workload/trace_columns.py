"""The columns of a trace format: the columns it reads and their meanings, unread columns, and values.

An invalid value in a file (a length of 5.5 tokens, a time that is not finite) is never rounded, and never
silently skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sim.workload.distributions import MAX_TOKENS

MAX_UNIX_S = 4_102_444_800.0
"""Unix time of the year 2100: the latest time in a measured result."""
MAX_SHOWN = 80
"""Maximum number of characters of a value in a message."""
_DECIMALS = re.compile(r"\s*(\d+)\.0*\s*")
DONE = (
    *(
        "ok",
        "success",
        "successful",
        "succeeded",
        "finished",
        "completed",
        "complete",
        "done",
        "200",
        "200.0",
    ),
    *("stop", "length", "stopped"),
)
"""Statuses and finish reasons of requests that were served, in lower case."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a format by their meaning. empty: the format has no such column.

    arrival, prompt and output must be in the file; the others may be missing. Lengths are in tokens.
    Alternative names are separated by |, as in "prompt_tokens|input_tokens"; the first one present is used.
    """

    arrival: str
    prompt: str
    output: str
    tenant: str = ""
    session: str = ""
    hashes: str = ""
    """Ids of the prompt's content, one per `HashedTrace.tokens_per_hash` tokens; the last may name fewer."""
    least_hash: int | None = None
    """The smallest valid id; None: ids may be negative."""
    no_hashes: str = ""
    """The text of the note for rows without ids; empty: there is no note."""
    hash_tokens: str = ""
    """The number of tokens per id, which must equal the setting."""
    cached: str = ""
    """Number of tokens at the beginning of a prompt shared with the session's previous prompt."""
    prefix_group: str = ""
    """Requests of a group begin with the same `prefix_tokens`, which come before the prompt tokens."""
    prefix_tokens: str = ""
    served_prompt: str = ""
    """Prompt tokens as counted by the server, which are used if there is no prefix; 0: unknown."""
    prompt_text: str = ""
    """The prompt as a text, whose tokens are counted if a row has no length."""
    more_output: str = ""
    """Tokens added to the output, such as reasoning."""
    status: str = ""
    """Rows whose status is not in `DONE` are counted but not replayed."""
    canceled: str = ""
    """Whether a request was canceled; if so, it is counted but not replayed."""
    left_out: str = ""
    """Why a row is counted but not replayed, as determined by `Trace.records`; empty: it is replayed."""
    failed: str = ""
    """Why rows without output are counted but not replayed, for any prompt; empty: see `empty`."""
    empty: str = ""
    """Why rows without prompt or output are counted but not replayed; empty: they are errors."""
    unknown: str = ""
    """Why rows with a missing length are counted but not replayed; empty: they are errors."""
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Columns that a file must not have, with the expected ones."""

    def in_file(self, names: Callable[[], Iterable[str]]) -> Columns:
        """Returns the columns with one name each. names: returns the column names of a file."""
        named = {one.name: str(getattr(self, one.name)) for one in fields(self) if one.name != "refused"}
        divided = {key: name.split("|") for key, name in named.items() if "|" in name}
        if not divided:
            return self
        found = set(names())
        chosen: dict[str, Any] = {
            key: next((one for one in listed if one in found), listed[0]) for key, listed in divided.items()
        }
        return replace(self, **chosen)

    @property
    def needed(self) -> tuple[str, str, str]:
        """The columns that must be there."""
        return self.arrival, self.prompt, self.output

    @property
    def required(self) -> list[str]:
        """The columns that every row must have."""
        return [*self.needed, *((self.session, self.cached) if self.cached else ())]

    @property
    def by_row(self) -> set[str]:
        """The columns that are read one row after the other."""
        names = (self.session, self.cached, self.prefix_group, self.prefix_tokens, self.served_prompt)
        return {*names, self.more_output, self.status, self.left_out} - {""}

    @property
    def in_columns(self) -> list[str]:
        """The columns that may be missing and can be read as columns."""
        return [*filter(None, (self.hashes, self.hash_tokens, self.canceled, self.tenant))]

    def only_by_row(self, names: Iterable[str]) -> bool:
        """Returns whether a file with these columns can only be read one row after the other."""
        return not {*self.by_row, *self.refused}.isdisjoint(names)

    @property
    def all(self) -> list[str]:
        """All columns that are read."""
        return [*self.needed, *self.in_columns, *self.by_row]


SUBJECTS: dict[str, tuple[str, ...]] = {
    "images and sound": (
        "image_tokens",
        "num_images",
        "numimages",
        "images",
        "image",
        "audio_tokens",
        "video_tokens",
    ),
    "models and adapters": (
        "model",
        "models",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "adapter",
        "adapter_id",
        "lora",
        "lora_id",
        "lora_name",
    ),
    "priorities": ("priority", "vllm_priority", "strict_priority", "slo_class", "policy_class"),
    "sessions": ("session_id", "conversation_id", "round_index"),
    "tenants": ("tenant", "tenant_id", "user_id"),
    "deadlines": ("deadline_us", "slo_target_us"),
    "delays": ("delay", "delay_ms", "think_time_us", "tool_wait_ms", "tool_call_latency"),
    "hidden tokens": ("reason_ratio", "reasoning_tokens"),
}
"""The meaning of a column, and its names in public formats, in lower case with underscores."""


def unused_columns(names: Iterable[str], used: Iterable[str]) -> str:
    """Returns a sentence on the columns that matter and are not used; empty if there are none.

    names: columns of the file. used: columns read by the format.
    """
    subject_of = {name: subject for subject, known in SUBJECTS.items() for name in known}
    plain = {name: name.strip().lower().replace(" ", "_") for name in names}
    read = set(used)
    found = [
        f"{shown(name)} ({subject_of[key]})"
        for name, key in plain.items()
        if key in subject_of and name not in read
    ]
    if not found:
        return ""
    return f"Columns of the trace that are not used, although they may matter: {', '.join(found)}."


def shown(found: object, max_chars: int = MAX_SHOWN) -> str:
    """Returns the beginning of a file's value for a message, with unprintable characters escaped."""
    text = str(found)[:max_chars]
    return text if text.isprintable() else repr(text)[1:-1][:max_chars]


def whole_number(found: object) -> int:
    """Returns an integer that a file has as an integer, as 5.0, or as the text of one of them.

    Table exports write integers as 5.0 if a column also has missing values. Raises ValueError.
    """
    if type(found) is int:
        return found
    if type(found) is float and found.is_integer():
        return int(found)
    if type(found) is str:
        decimals = _DECIMALS.fullmatch(found)
        return int(decimals[1] if decimals else found)
    raise ValueError(found)


def tokens_rule(least: int, most: int = MAX_TOKENS) -> str:
    """Returns the rule of a number of tokens, for messages."""
    return f"a whole number of tokens from {least} to {most:,}"


def tokens(found: object, least: int = 1, most: int = MAX_TOKENS) -> int:
    """Returns a number of tokens. Raises ValueError unless it is an integer within the limits."""
    number = whole_number(found)
    if not least <= number <= most:
        raise ValueError(found)
    return number


def is_tokens(found: object, least: int = 1) -> bool:
    """Returns whether a JSON value is a number of tokens; a string is not."""
    try:
        return type(found) is not str and tokens(found, least) >= least
    except ValueError:
        return False


def field_tokens(where: str, field: str, found: object, least: int = 0) -> int:
    """Returns a number of tokens. where: the row or element. Raises ValueError that names the field."""
    if is_tokens(found, least):
        return whole_number(found)
    raise ValueError(f"{where}: {field}={shown(found)}: must be {tokens_rule(least)}")


def field_seconds(where: str, field: str, found: object, *, least: float = 0.0, unit_s: float = 1.0) -> float:
    """Returns a time in seconds. where: as above; unit_s: the seconds of the field's unit, 1e-3 for ms.

    Raises ValueError that names the field, unless the value is a finite number from `least` (in seconds) to
    the year 2100.
    """
    if type(found) in (int, float):
        assert isinstance(found, int | float)
        # Compared before the product: an integer of JSON may be too large for a float.
        if least / unit_s <= found <= MAX_UNIX_S / unit_s:
            return float(found) * unit_s
    bounds = f"at most {MAX_UNIX_S / unit_s:g}"
    bounds = bounds if least == -math.inf else f"from {least / unit_s:g} to {MAX_UNIX_S / unit_s:g}"
    raise ValueError(f"{where}: {field}={shown(found)}: must be a finite number {bounds}")
