"""Controls of the page: settings of `simulate`, parsed from the page and its address, and their steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import Choice, find_groups
from experiments.app.settings.override import Override
from experiments.app.settings.variants import Variants
from experiments.study.figures import leaves
from experiments.study.request_limit import limiting_override
from sim.settings.build import shown
from sim.settings.errors import ConfigError, suggest
from sim.settings.scenario import build_scenario

State = Mapping[str, Any]
"""Key of a control -> value."""

WORKLOAD = "workload=synthetic"
"""Workload of the page, unless the command line sets another."""
MAX_CHARACTERS = 100
"""Longest text that a control accepts, in characters."""
MAX_FIELDS = 64
"""Largest number of settings in an address."""
REQUESTS = 2000
"""Requests of a run, unless the command line sets the workload's number of requests."""
MOST = {
    "replicas": 64,
    "tensor_parallel_size": 64,
    "workload.arrivals.rate_per_s": 10_000,
    "workload.lengths.prompt_tokens.mean": 1_000_000,
    "workload.lengths.output_tokens.mean": 10_000,
    "load": 1000,
    "prompt_scale": 100,
    "output_scale": 100,
    "slo.attainment_target": 1,
    "seed": 2**32 - 1,
}
"""Largest values of controls, so that a simulation takes seconds and fits in memory."""
TENSOR_PARALLEL = "tensor_parallel_size"
GROUPS = {"model": "model", "hardware": "GPU", "engine": "engine"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """Setting that can be changed on the page."""

    key: str
    """Key of the config, which is also its name in the page's address."""
    label: str
    default: Any
    kind: Literal["choice", "whole", "number"]
    options: tuple[Choice, ...] = ()
    """Choices of a control of kind choice."""
    minimum: float = 0.0
    maximum: float | None = None
    step: float | None = None
    """Step of the arrow keys; None: any."""
    optional: bool = False
    """True if it may be empty, which means null."""

    def parse(self, given: Any) -> Any:
        """Returns the value of a text or number from the page or its address.

        Raises ValueError, which names the allowed values.
        """
        if not isinstance(given, str | int | float | None) or isinstance(given, bool):
            raise ValueError(f"{self.key}: must be text or a number, not a {type(given).__name__}")
        if isinstance(given, str) and len(given) > MAX_CHARACTERS:
            raise ValueError(f"{self.key}: must have at most {MAX_CHARACTERS} characters")
        if self.kind == "choice":
            names = [option.name for option in self.options]
            if given not in names:
                known = suggest(str(given or ""), names, listed_by=f"windtunnel list {self.key}")
                raise ValueError(f"{self.key}={given}: no such choice; {known}")
            return given
        if given is None or given == "" or given == "null":
            if self.optional:
                return None
            raise ValueError(f"{self.key}: {self.rule}, such as {shown(self.default)}")
        try:
            value = float(given)
        except (ValueError, OverflowError):
            raise ValueError(f"{self.key}={given}: {self.rule}") from None
        if (
            not math.isfinite(value)
            or value < self.minimum
            or (self.maximum is not None and value > self.maximum)
            or (self.kind == "whole" and value != int(value))
        ):
            raise ValueError(f"{self.key}={given}: {self.rule}")
        return int(value) if value == int(value) else value

    @property
    def rule(self) -> str:
        """Rule for its numbers, as a part of a sentence."""
        what = "a whole number" if self.kind == "whole" else "a number"
        if self.maximum is None:
            return f"must be {what} >= {self.minimum:g}"
        return f"must be {what} from {self.minimum:g} to {self.maximum:,.12g}"


@dataclass(frozen=True, kw_only=True)
class Board:
    """Controls of a page, and the config that they change."""

    variants: Variants
    """Configs of `simulate`, by the overrides of the page."""
    base: tuple[str, ...]
    """Overrides of `simulate` that apply before those of the page."""
    cfg: Mapping[str, Any]
    """Resolved config of the default state."""
    controls: tuple[Control, ...]

    @property
    def numbers(self) -> list[Control]:
        """Controls that take a number, in the order of the page."""
        return [control for control in self.controls if control.kind != "choice"]

    @property
    def defaults(self) -> dict[str, Any]:
        """State of the controls before any change."""
        return {control.key: control.default for control in self.controls}

    def changed(self, state: State) -> dict[str, Any]:
        """Returns the values that differ from the defaults, in the order of the controls."""
        return {c.key: state[c.key] for c in self.controls if state[c.key] != c.default}

    def overrides(self, state: State) -> list[str]:
        """Returns the overrides of `simulate` that give the same figures as the page."""
        return [*self.base, *self.own_overrides(state)]

    def own_overrides(self, state: State) -> list[str]:
        """Returns the overrides that were made on the page."""
        return [f"{key}={shown(value)}" for key, value in self.changed(state).items()]

    def config(self, state: State) -> dict[str, Any]:
        """Composes the config of `simulate`, with interpolations unresolved. Raises ConfigError."""
        return self.variants.config(self.own_overrides(state))

    def command_line(self, state: State) -> str:
        """Returns the equivalent command, quoted for a shell."""
        words = (f"'{o}'" if set(o) & set(' {}[]()*?$&;|<>"') else o for o in self.overrides(state))
        return " ".join(["windtunnel simulate", *words])

    def query(self, state: State) -> str:
        """Returns the query of the page's address: empty, or ?key=value&..."""
        changed = {key: shown(value) for key, value in self.changed(state).items()}
        return f"?{urlencode(changed)}" if changed else ""

    def state_of(self, query: str) -> tuple[dict[str, Any], list[str]]:
        """Parses the query of an address; returns the state, with defaults for wrong values, and problems."""
        try:
            pairs = parse_qsl(query.removeprefix("?"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
        except ValueError:
            return self.defaults, [
                f"The address has more than {MAX_FIELDS} settings, so it is ignored and defaults are used."
            ]
        given = dict(pairs)
        known = {control.key for control in self.controls}
        problems = [
            f"{key}: is not a control of this page; {suggest(key, sorted(known))}"
            for key in given
            if key not in known
        ]
        state, wrong = self.parse({**self.defaults, **{k: v for k, v in given.items() if k in known}})
        return state, problems + wrong

    def parse(self, given: State) -> tuple[dict[str, Any], list[str]]:
        """Parses the values of all controls; returns the state and problems. Wrong values become defaults."""
        state, problems = self.defaults, []
        for control in self.controls:
            try:
                state[control.key] = control.parse(given.get(control.key))
            except ValueError as error:
                problems.append(str(error))
        return state, problems


def board_of(source: ConfigSource, overrides: Sequence[str]) -> Board:
    """Builds the controls. source: root config and folders of `simulate`.

    Raises ConfigError for a wrong setting, and for one outside the limits of its control.
    """
    base = list(overrides)
    if not any(Override.parse(o).name == "workload" for o in base):
        base.insert(0, WORKLOAD)
    limit = limiting_override(Variants(source, base).config(), base, REQUESTS)
    if limit is not None:
        base.append(limit)
    variants = Variants(source, base)
    cfg = resolved(variants.config())
    return Board(
        variants=variants,
        base=tuple(base),
        cfg=cfg,
        controls=(*_choices(source, base), *_numbers(cfg)),
    )


def _choices(source: ConfigSource, base: Sequence[str]) -> list[Control]:
    """Returns the controls of groups; choices that need a file of the user's are left out, unless in use."""
    groups = find_groups(source.dirs)
    chosen = source.compose(base, with_hydra=True).hydra.runtime.choices
    found = []
    for group, label in GROUPS.items():
        present = str(chosen[group])
        options = tuple(
            choice
            for choice in groups[group]
            if choice.name == present or "???" not in choice.file.read_text(encoding="utf-8")
        )
        found.append(Control(key=group, label=label, default=present, kind="choice", options=options))
    return found


def _numbers(cfg: Mapping[str, Any]) -> list[Control]:
    """Returns the controls of numbers.

    Rate and lengths of a synthetic workload are set in their own units, those of other workloads as factors.
    """
    value_of = dict(leaves(cfg))
    traffic = [
        (
            ("workload.arrivals.rate_per_s", "request rate, requests/s", 1.0),
            ("load", "factor on the request rate", 0.5),
        ),
        (
            ("workload.lengths.prompt_tokens.mean", "mean prompt tokens", 128.0),
            ("prompt_scale", "factor on prompt lengths", 0.5),
        ),
        (
            ("workload.lengths.output_tokens.mean", "mean output tokens", 32.0),
            ("output_scale", "factor on output lengths", 0.5),
        ),
    ]
    found = [
        _whole(value_of, "replicas", "replicas", 1),
        _whole(value_of, "tensor_parallel_size", "tensor parallel size", 1),
    ]
    if cfg["pools"]:
        found = []  # each pool has its own replicas and tensor parallel size
    for own, multiple in traffic:
        key, label, step = own if value_of.get(own[0]) is not None else multiple
        found.append(_number(value_of, key, label, step=step, minimum=1e-3))
    if cfg["slo"]:
        found += [
            _number(value_of, "slo.ttft_ms", "SLO limit: TTFT, ms", step=50.0, minimum=1e-3, optional=True),
            _number(value_of, "slo.tpot_ms", "SLO limit: TPOT, ms", step=5.0, minimum=1e-3, optional=True),
            _number(
                value_of, "slo.attainment_target", "SLO attainment target, share", step=0.01, minimum=0.01
            ),
        ]
    return [*found, _whole(value_of, "seed", "random seed", 0)]


def _whole(value_of: Mapping[str, Any], key: str, label: str, minimum: int) -> Control:
    value = value_of.get(key)
    return _checked(
        Control(key=key, label=label, default=value, kind="whole", minimum=minimum, maximum=MOST[key], step=1)
    )


def _number(
    value_of: Mapping[str, Any],
    key: str,
    label: str,
    *,
    step: float,
    minimum: float,
    optional: bool = False,
) -> Control:
    value = value_of.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return _checked(
        Control(
            key=key,
            label=label,
            default=value,
            kind="number",
            minimum=minimum,
            maximum=MOST.get(key),
            step=step,
            optional=optional,
        )
    )


def _checked(control: Control) -> Control:
    """Returns the control. Raises ConfigError if its default is outside its own limits."""
    given = control.default
    try:
        is_number = isinstance(given, int | float) and not isinstance(given, bool)
        if not (is_number or (given is None and control.optional)):
            raise ValueError(f"{control.key}={shown(given)}: {control.rule}")
        control.parse(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return control


def stepped(board: Board, state: State, key: str, *, up: bool) -> Any:
    """Returns the next value of a control of numbers in one direction, or its value if it is the last one.

    Tensor parallel sizes that the model cannot be divided into, or that one node cannot hold, are left out.
    """
    control = next(control for control in board.controls if control.key == key)
    value = state[key]
    if value is None:
        return control.default if control.default is not None else control.step
    if key == TENSOR_PARALLEL:
        most = control.maximum or math.inf
        sizes = range(value + 1, int(most) + 1) if up else range(value - 1, 0, -1)
        return next(_allowed(board, state, sizes), value)
    return _limited(control, value + (control.step or 1.0) * (1 if up else -1))


def _limited(control: Control, value: float) -> float:
    """Returns the value within the limits of the control, without rounding errors of steps such as 0.01."""
    most = math.inf if control.maximum is None else control.maximum
    limited = round(min(max(value, control.minimum), most), 6)
    return int(limited) if limited == int(limited) else limited


def _allowed(board: Board, state: State, sizes: Iterable[int]) -> Iterator[int]:
    """Yields the sizes that model and device allow; all sizes if the other settings are wrong."""
    try:
        scenario = build_scenario(resolved(board.config({**state, TENSOR_PARALLEL: 1})))
    except ConfigError:
        yield from sizes
        return
    for size in sizes:
        try:
            scenario.hardware.check_reaches(size)
            scenario.model.check_tensor_parallel_size(size)
        except ValueError:
            continue
        yield size
