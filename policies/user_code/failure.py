"""The sentence about a policy that failed: its choice, what it did, when, what is allowed, and where."""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from policies.user_code.decisions import (
    PACKAGES,
    Call,
    WrongDecisionError,
    calls_of,
    definition,
    files_of,
    is_of_user,
    package_of,
    quoted,
)

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
    """Action of a policy, and the rule about it."""

    text: str
    allowed: str


class PolicyError(Exception):
    """A policy has failed; the message is one sentence, and can be sent to another process."""

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
    """Notes the time in seconds at which an error has ended a run, for `failure`."""
    setattr(error, _TIME, at_s)


def failure(error: BaseException, policies: Iterable[Policy]) -> PolicyError | None:
    """Returns the error to show in place of one that a policy has caused; None if no policy has.

    policies: all policies of the run. The time is that of `note_time`, else the engine's.
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
    """Returns the place of the user's code at which importing it has failed; empty if it is not known."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return quoted(error.filename, error.lineno, "", error.text or "")
    own = [call for call in calls_of(error) if call.is_of_user(())]
    return own[-1].quoted() if own else ""


def _decided(error: WrongDecisionError, named: Sequence[Policy]) -> tuple[Policy, Did]:
    """Names the policy with a wrong decision.

    Our batching policy that schedules nothing does so because a user's policy, such as a cache, keeps it
    from doing so.
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
    """Returns the policy to which the user's frames belong: by the object, else by its file."""
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
    """Says what a frame of the user did: used what does not exist, called ours wrongly, or raised."""
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
    """Finds the policy that lacks a method, or has one with other arguments; None: neither is the case."""
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
    """Returns the time, replica and iteration of a failure; empty if there is none, as before a run."""
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
    """Returns the name by which a frame knows an object, else that of its class."""
    names = (name for name, found in call.frame.f_locals.items() if found is value and name != "self")
    return next(names, type(value).__name__)


def _allowed(cls: type, name: str) -> str:
    """Returns the names that a class has for policies, the nearest first."""
    ours = [base for base in cls.__mro__ if _is_ours(base)]
    # A base named ...Base is a part of the next class, which is the one that policies know.
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
    """Returns (what is wrong, the method's name) of a user's class with a method of other arguments.

    kind: the class or protocol of the family. Both are empty if all of the methods take their arguments.
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
