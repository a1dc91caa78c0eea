"""The boundary between this project and a user's policy: its traits, name, decisions and failures.

A policy need not inherit from a class of this project. Each family therefore lists optional members, in
addition to the methods of its protocol, in a frozen dataclass that `traits_of` reads:

    traits_of(routing, RoutingTraits).reads_signals

Messages name policies as users write them. Tests cover the return values of this project's policies, so only
user policies are wrapped. The module therefore distinguishes the user's classes and frames from those of this
project and of libraries. A user's policy may raise, call a method that does not exist, or return an invalid
value: `failure` reads the traceback afterwards, and writes a sentence with the policy, its choice, its
action, the time, the rule, and the place.
"""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class _Traits(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


Traits = TypeVar("Traits", bound=_Traits)

_LEFT_OUT: Final = object()


def traits_of(policy: object, family: type[Traits]) -> Traits:
    """Returns a policy's values for the traits of its family; missing traits have their defaults."""
    said = {each.name: getattr(policy, each.name, _LEFT_OUT) for each in fields(family)}
    return family(**{name: value for name, value in said.items() if value is not _LEFT_OUT})


OTHERWISE_NAMED = {
    "AdmitAll": "none",
    "BestFitDecreasing": "best_fit",
    "BucketClassifier": "buckets",
    "EarliestDeadlineFirst": "edf",
    "FastGen": "fastgen",
    "FirstFitDecreasing": "first_fit",
    "InFlight": "inflight",
    "NoDrafts": "none",
    "OracleWithNoise": "oracle",
    "PrefixCaching": "prefix",
    "PromptLengthRegression": "regression",
    "RunningHistogram": "histogram",
    "SnapKv": "snapkv",
    "SplitFuse": "splitfuse",
    "Stay": "none",
}
"""Classes whose choice in configs/ has a different name -> the choice."""

_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_of(policy: object) -> str:
    """Returns the choice that a policy's class is, by its name: LongestPrefix -> longest_prefix."""
    return name_of_class(type(policy))


def name_of_class(cls: type) -> str:
    """Returns the choice that a class is, by its name."""
    name = cls.__name__
    return OTHERWISE_NAMED.get(name) or _WORD.sub("_", name).lower()


MAX_SHOWN = 60
"""Length at which the text of a returned value is cut."""


class WrongDecisionError(RuntimeError):
    """A policy has returned or decided something invalid."""

    def __init__(self, policy: object, method: str, did: str, allowed: str) -> None:
        """Creates the error. did: the method's action, such as `returned 7`. allowed: the rule."""
        super().__init__(f"{type(policy).__name__}: {method} {did}; {allowed}")
        self.policy, self.method, self.did, self.allowed = policy, method, did, allowed


def returned(policy: object, method: str, value: object, allowed: str) -> WrongDecisionError:
    """Returns the error about a returned value. allowed: the rule, `must be a whole number`."""
    return WrongDecisionError(policy, method, f"returned {shown(value)}", f"it {allowed}")


def shown(value: object) -> str:
    """Returns the text of a value, with its type unless obvious, cut to `MAX_SHOWN` characters."""
    text = repr(value)
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    if type(value).__name__ in text or isinstance(value, bool | int | float | str | tuple | list | None):
        return text
    return f"{text} ({type(value).__name__})"


def is_whole(value: object) -> bool:
    """Returns whether a value is a Python or numpy integer, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def checked_rank(policy: object, method: str = "rank") -> Callable[[Any], tuple[float, ...]]:
    """Returns a scheduling policy's method of that name; for a user's policy it checks each rank."""
    rank: Callable[[Any], tuple[float, ...]] = getattr(policy, method)
    if not is_of_user(type(policy)):
        return rank

    @wraps(rank)
    def checked(seq: Any) -> tuple[float, ...]:
        found: Any = rank(seq)
        if not isinstance(found, tuple) or not all(isinstance(n, Real) and n == n for n in found):  # no NaN
            raise returned(policy, method, found, "must return a tuple of numbers, such as (seq.request_id,)")
        return found

    return checked


def checked_prediction(predictor: object) -> Callable[[Any, int | None], int]:
    """Returns a predictor's method `predict`; for a user's predictor it checks each length."""
    predict: Callable[[Any, int | None], int] = predictor.predict  # type: ignore[attr-defined]
    if not is_of_user(type(predictor)):
        return predict

    @wraps(predict)
    def checked(request: Any, true_num_tokens: int | None) -> int:
        found: Any = predict(request, true_num_tokens)
        most = request.max_tokens
        if not is_whole(found) or found < 1 or (most is not None and found > most):
            limit = "" if most is None else f" and <= {most}, the request's max_tokens"
            rule = f"must return a whole number of tokens >= 1{limit}"
            raise returned(predictor, "predict", found, rule)
        return int(found)

    return checked


def checked_draft_lengths(policy: object) -> Callable[[Any], int | NDArray[np.int64]]:
    """Returns a draft-length policy's `num_draft_tokens`; for a user's policy it checks the numbers."""
    decide: Callable[[Any], int | NDArray[np.int64]] = policy.num_draft_tokens  # type: ignore[attr-defined]
    if not is_of_user(type(policy)):
        return decide

    @wraps(decide)
    def checked(view: Any) -> int | NDArray[np.int64]:
        found: Any = decide(view)
        most, num_seqs = view.max_draft_tokens, len(view.sequences)
        is_array = getattr(found, "shape", None) == (num_seqs,) and found.dtype.kind in "iu"
        numbers = found.tolist() if is_array else [found]
        if not all(is_whole(number) and 0 <= number <= most for number in numbers):
            rule = f"must return a whole number from 0 to {most}, or an array of {num_seqs}, one per sequence"
            raise returned(policy, "num_draft_tokens", found, rule)
        return found.astype("int64") if is_array else int(found)

    return checked


PACKAGES = ("experiments", "fieldlimits", "hwmodels", "kernels", "policies", "realengine", "sim")
"""The packages of this project."""

_LIBRARIES = tuple(
    f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_NO_POLICIES = {*sys.stdlib_module_names, "numpy", "pandas", "omegaconf"} - {"__main__"}
"""Packages whose values may occur in settings, in addition to this project's."""


class Call(NamedTuple):
    """A frame of a traceback, and its current line."""

    frame: FrameType
    line: int

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.frame.f_code.co_name

    @property
    def first_argument(self) -> Any:
        """The object of a method's call, such as the policy; None for a function without arguments."""
        code = self.frame.f_code
        return self.frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None

    @property
    def is_ours(self) -> bool:
        """True if the code belongs to this project."""
        return _top(str(self.frame.f_globals.get("__name__", ""))) in PACKAGES

    def is_of_user(self, packages: Collection[str]) -> bool:
        """Returns whether the code is the user's.

        packages: the packages of the user's policies, which may be installed like libraries.
        """
        file = self.frame.f_code.co_filename
        if self.is_ours or file == "<string>" or file.startswith("<frozen"):  # dataclasses are "<string>"
            return False
        if _top(str(self.frame.f_globals.get("__name__", ""))) in packages:
            return True
        return not str(Path(file).resolve()).startswith(_LIBRARIES)

    def quoted(self) -> str:
        """Returns file, line and source as lines of a message."""
        return quoted(self.frame.f_code.co_filename, self.line, self.name)


def calls_of(error: BaseException) -> list[Call]:
    """Returns the calls of an error's traceback, the outermost first."""
    return [Call(frame, line) for frame, line in walk_tb(error.__traceback__)]


def is_of_user(cls: type) -> bool:
    """Returns whether a class belongs to the user, not to this project or a library."""
    top = package_of(cls)
    return top not in PACKAGES and top not in _NO_POLICIES


def package_of(cls: type) -> str:
    """Returns the name of the top-level package, or module, that defines a class."""
    return _top(cls.__module__)


def files_of(cls: type) -> Iterator[str]:
    """Yields the user's files that define a class and its bases."""
    for each in cls.__mro__:
        module = sys.modules.get(each.__module__)
        if is_of_user(each) and getattr(module, "__file__", None):
            yield str(module.__file__)  # type: ignore[union-attr]


def definition(cls: type, method: str = "") -> str:
    """Returns file, line and source of a user's method, or of the class, as lines of a message."""
    found = inspect.unwrap(getattr(cls, method, cls))
    code = getattr(found, "__code__", None)
    if code is not None and _top(getattr(found, "__module__", "") or "") not in PACKAGES:
        first = code.co_firstlineno
        while linecache.getline(code.co_filename, first).lstrip().startswith("@"):
            first += 1
        return quoted(code.co_filename, first, method)
    try:
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return ""
    skipped = next((i for i, line in enumerate(lines) if line.lstrip().startswith("class ")), 0)
    return quoted(inspect.getsourcefile(cls) or "", first + skipped, "")


def quoted(file: str, line: int, function: str, source: str = "") -> str:
    """Returns a location in a file, and its source line, as lines of a message."""
    place = Path(file)
    if place.is_absolute() and place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    where = f", in {function}" if function and not function.startswith("<") else ""
    text = (source or linecache.getline(file, line)).strip()
    return f"  {place}:{line}{where}" + (f"\n    {text}" if text else "")


def _top(module: str) -> str:
    return module.partition(".")[0]


MAX_LISTED = 16
"""Number of allowed names up to which a message lists all."""
INTERFACES = "see docs/policies.md"
_TIME = "_ended_at_s"


class Policy(NamedTuple):
    """A policy of a run, with its key (`pools.a.batching`) and its choice (`my_policy`)."""

    key: str
    choice: str
    cls: type
    policy: object = None
    """The object, once there is one."""

    def __str__(self) -> str:
        return f"{self.key}={self.choice}" + (f" ({self.path})" if self.is_of_user else "")

    @property
    def path(self) -> str:
        return f"{self.cls.__module__}.{self.cls.__qualname__}"

    @property
    def is_of_user(self) -> bool:
        return is_of_user(self.cls)


class Did(NamedTuple):
    """An action of a policy, and the rule that it breaks."""

    text: str
    allowed: str


class PolicyError(Exception):
    """A policy has failed; the message is one sentence. The error can be sent to another process."""

    def __init__(
        self, sentence: str, quote: str = "", trace: str = "", named: tuple[str, str, str] | None = None
    ) -> None:
        """Creates the error. quote: file, line and source of the user's own code. trace: the whole traceback.

        named: key, choice and class of the policy in the sentence.
        """
        super().__init__(sentence, quote, trace, named)
        if quote:
            self.add_note(quote)
        self.quote = quote
        self.trace = trace
        self.named = named

    def __str__(self) -> str:
        return str(self.args[0])


def note_time(error: BaseException, at_s: float) -> None:
    """Stores the time in seconds at which an error ended a run, for `failure`."""
    setattr(error, _TIME, at_s)


def failure(error: BaseException, policies: Iterable[Policy]) -> PolicyError | None:
    """Returns the error to show instead of one caused by a policy; None if no policy caused it.

    policies: all policies of the run. The time comes from `note_time`, else from the engine.
    """
    named = list(policies)
    if isinstance(error, PolicyError):
        return None
    if not isinstance(error, WrongDecisionError) and not any(p.is_of_user for p in named):
        return None
    calls = calls_of(error)
    packages = {package_of(p.cls) for p in named if p.is_of_user}
    own = [call for call in calls if call.is_of_user(packages)]
    if isinstance(error, WrongDecisionError):
        culprit, did = _decided(error, named)
        quote = own[-1].quoted() if own else definition(culprit.cls, error.method)
    elif own:
        culprit = _policy_of(own, named)
        did = _raised(error, calls, own)
        quote = own[-1].quoted()
    else:
        found = _missing(error, calls, named)
        if found is None:
            return None
        culprit, did, quote = found
    when = _when(calls, getattr(error, _TIME, None))
    sentence = f"{culprit}: {when}{did.text}; {did.allowed}"
    trace = "".join(traceback.format_exception(error))
    name = (culprit.key, culprit.choice, culprit.path)
    return PolicyError(sentence, quote if culprit.is_of_user else "", trace, name)


def quote_of(error: BaseException) -> str:
    """Returns the place in the user's file that caused an error; empty if there is none."""
    found = cause_of(error)
    return found.quote if found is not None else ""


def with_quote(error: BaseException) -> str:
    """Returns the message of an error, and below it the place in the user's file that caused it."""
    quote = quote_of(error)
    return f"{error}\n{quote}" if quote else str(error)


def trace_of(error: BaseException) -> str:
    """Returns the traceback of the policy's error that caused an error; empty if there is none."""
    found = cause_of(error)
    return found.trace if found is not None else ""


def cause_of(error: BaseException | None) -> PolicyError | None:
    """Returns the policy's error in the chain of causes."""
    seen: set[int] = set()  # `raise error from error` makes an error its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, PolicyError):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def import_quote(error: BaseException) -> str:
    """Returns the place at which importing the user's code failed; empty if unknown."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return quoted(error.filename, error.lineno, "", error.text or "")
    own = [call for call in calls_of(error) if call.is_of_user(())]
    return own[-1].quoted() if own else ""


def _decided(error: WrongDecisionError, named: Sequence[Policy]) -> tuple[Policy, Did]:
    """Names the policy with a wrong decision.

    If a built-in batching policy schedules nothing, a user's policy, such as a cache, is the cause.
    """
    cls = type(error.policy)
    same = [p for p in named if p.policy is error.policy] or [p for p in named if p.cls is cls]
    found = same[0] if same else Policy("policy", cls.__name__, cls, error.policy)
    if not found.is_of_user:
        users = [p for p in named if p.is_of_user and p.key.rpartition(".")[2] in ("caching", "scheduling")]
        if users:
            text = f"with it, {error.method} of {found} {error.did}"
            return users[0], Did(text, error.allowed)
    return found, Did(f"{error.method} {error.did}", error.allowed)


def _policy_of(own: Sequence[Call], named: Sequence[Policy]) -> Policy:
    """Returns the policy to which the user's frames belong, by the object or else by its file."""
    users = [p for p in named if p.is_of_user]
    for call in reversed(own):
        for each in users:
            if type(call.first_argument) is each.cls:
                return each
    for call in reversed(own):
        for each in users:
            if call.frame.f_code.co_filename in files_of(each.cls):
                return each
    return users[0] if len(users) == 1 else Policy("policy", own[0].name, own[0].first_argument.__class__)


def _raised(error: BaseException, calls: Sequence[Call], own: Sequence[Call]) -> Did:
    """Describes a user frame's error: a missing name, a wrong call of this project's code, or a raise."""
    method, last = own[0].name, own[-1]
    if isinstance(error, AttributeError) and error.obj is not None and _is_ours(type(error.obj)):
        return Did(f"{method} used {_name_in(last, error.obj)}.{error.name}, which does not exist",
                   _allowed(type(error.obj), str(error.name)))  # fmt: skip
    kind, text = type(error).__name__, str(error)
    what = f"{kind}: {text}" if text else kind
    place = calls.index(last) + 1
    if place < len(calls) and calls[place].is_ours:
        callee = calls[place]
        name = f"{_name_in(last, callee.first_argument)}.{callee.name}"
        if isinstance(error, ValueError):
            return Did(f"{method} called {name}, which refused the call: {text}", INTERFACES)
        return Did(
            f"{method} called {name} with a wrong argument ({what})", f"it takes {_parameters(callee)}"
        )
    if isinstance(error, SystemExit):
        return Did(f"{method} called sys.exit", "a policy must return")
    return Did(f"{method} raised {what}", "a policy must not raise")


def _missing(
    error: BaseException, calls: Sequence[Call], named: Sequence[Policy]
) -> tuple[Policy, Did, str] | None:
    """Finds the policy that lacks a method, or has one with wrong arguments; None if there is none."""
    users = [p for p in named if p.is_of_user]
    for each in users:
        cls = each.cls
        if isinstance(error, NotImplementedError) and calls and type(calls[-1].first_argument) is cls:
            name = calls[-1].name
            did = Did(f"has no {name}{_parameters(calls[-1])}", f"it must define {name}")
            return each, did, definition(cls)
        wrong = re.match(r"(?:.*\.)?(\w+)\.(\w+)\(\) ", str(error))
        if isinstance(error, TypeError) and wrong and wrong[1] in [base.__name__ for base in cls.__mro__]:
            did = Did(f"{wrong[2]} does not take its arguments ({error})", INTERFACES)
            return each, did, definition(cls, wrong[2])
    return None


def _when(calls: Sequence[Call], at_s: float | None) -> str:
    """Returns the time, replica and iteration of a failure; empty if there is none, such as before a run."""
    objects = [call.frame.f_locals.get("self") for call in calls if call.is_ours]
    core = next((o for o in objects if hasattr(o, "num_iterations") and hasattr(o, "block_pool")), None)
    replica = next((o for o in objects if hasattr(o, "core") and hasattr(o, "index")), None)
    if at_s is None and core is not None:
        at_s = max(core.now, 0.0)
    if at_s is None:
        return ""
    where = "" if core is None else f" in iteration {core.num_iterations}"
    if core is not None and replica is not None:
        where += f" of replica {replica.index}"
    return f"at {at_s:.6g} s{where}, "


def _is_ours(cls: type) -> bool:
    return package_of(cls) in PACKAGES


def _name_in(call: Call, value: Any) -> str:
    """Returns an object's variable name in a frame, or else its class name."""
    names = (name for name, found in call.frame.f_locals.items() if found is value and name != "self")
    return next(names, type(value).__name__)


def _allowed(cls: type, name: str) -> str:
    """Returns a class's names as seen by policies, the nearest first."""
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    # A base named ...Base is a part of the next class, which policies know.
    known = next((base for base in reversed(ours) if not base.__name__.endswith("Base")), cls)
    names = list(getattr(known, "FOR_POLICIES", ())) or [n for n in dir(known) if not n.startswith("_")]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    parts = [f"nearest: {', '.join(close)}"] if close else []
    parts.append(f"allowed: {', '.join(names)}" if len(names) <= MAX_LISTED else INTERFACES)
    return "; ".join(parts)


def _parameters(call: Call) -> str:
    """Returns the parameters of a function as they are written, without `self` and types."""
    code = call.frame.f_code
    names = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    return f"({', '.join(n for n in names if n != 'self')})"


def signature_lack(cls: type, kind: type, methods: Iterable[str]) -> tuple[str, str]:
    """Returns (the problem, the method's name) if a method of a user's class has wrong arguments.

    kind: the class or protocol of the family. Both are empty if all methods accept their arguments.
    """
    if not is_of_user(cls):
        return "", ""
    for name in methods:
        own, wanted = inspect.getattr_static(cls, name, None), inspect.getattr_static(kind, name, None)
        called = inspect.unwrap(own.__func__ if isinstance(own, staticmethod | classmethod) else own)
        if not (inspect.isfunction(wanted) and inspect.isfunction(called)):
            continue
        parameters = list(inspect.signature(wanted).parameters.values())[1:]
        by_keyword = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
        by_position = [p for p in parameters if p.name not in by_keyword]
        num_bound = 0 if isinstance(own, staticmethod) else 1
        signature = inspect.signature(called)
        try:
            signature.bind(*["self"] * num_bound, *by_position, **by_keyword)
        except TypeError:
            found = ", ".join(list(signature.parameters)[num_bound:])
            listed = ", ".join(p.name for p in parameters)
            return f"has {name}({found}), which must be {name}({listed})", name
    return "", ""
