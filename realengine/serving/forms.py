"""Outputs of a form: JSON of a schema, a match of a regular expression, one of some texts, or of a grammar.

The optional package llguidance says which tokens may come next. An output has a matcher that follows its
tokens; before each of them, it gives a bit for each token of the vocabulary. A token that ends the output is
allowed where the text is complete, and the only one where nothing may follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import islice
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realengine.serving.tokenizer import Tokenizer

LAYOUT: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
"""How JSON is written: as `json.dumps` does. With any white space, a model may write it without an end."""
MAX_CHARS = 1 << 17
"""Characters of a form; one as large may take seconds to be read."""
MAX_KNOWN = 64
"""Forms that are kept for further requests."""
MAX_PLACES = 200
"""Parts of a schema in which a mistake is searched."""
MAX_MESSAGE_CHARS = 400
NOTHING = ("NoExtension", "NoExtensionBias")
"""How llguidance says that no token may come, though the text is not complete."""
CANNOT_GO_ON = "the output cannot go on in its form"
"""How the error of an output begins whose form has turned out to be too large, or to be without an end."""
INSTALL = "needs the package llguidance, which is not installed: pip install 'windtunnel[engine]'"


class FormError(ValueError):
    """A form that cannot be read, or that an output cannot have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """The form of an output, with vLLM's names: one of these. Raises ValueError for none or several."""

    json: Mapping[str, Any] | bool | None = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression, in the syntax of Rust's crate regex, that matches the whole output.

    Its classes of digits and of words are those of ASCII, as in JavaScript and in patterns of JSON schemas.
    """
    choice: Sequence[str] | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """A grammar, in llguidance's variant of Lark, or in GBNF (`root ::= ...`)."""

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.json, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("structured_outputs: give exactly one of json, regex, choice and grammar")


class Growing(Protocol):
    """An output as far as it has come; finish_reason: None until its end."""

    tokens: list[int]
    finish_reason: str | None


class Form:
    """The form of one output of an engine, and how far the output has come."""

    def __init__(self, matcher: Any, output: Growing, num_words: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._output = output
        self._num_words = num_words  # of the bits
        self._eos_token_ids = eos_token_ids
        self._num_followed = 0  # tokens of the output that the matcher knows

    def has_ended(self) -> bool:
        """Returns whether no more tokens follow."""
        return self._output.finish_reason is not None

    def allowed(self) -> NDArray[np.int32]:
        """Returns a bit for each token that may come after those of the output. Raises FormError."""
        matcher, tokens = self._matcher, self._output.tokens
        new = tokens[self._num_followed :]
        self._num_followed = len(tokens)
        if not matcher.is_stopped():
            matcher.consume_tokens(new)
        return _bits(matcher, self._num_words, self._eos_token_ids)


class Forms:
    """Reads forms for a model, each once. tokenizer: of the model; None: it has none.

    vocab_size: rows of the model's logits. eos_token_ids: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._num_words = 0  # of 32 bits, for all tokens; known with the tokenizer
        self._own: Any = None  # the tokenizer as llguidance has it
        self._making = Lock()
        self._matcher = lru_cache(MAX_KNOWN)(self._new_matcher)

    def check(self, asked: StructuredOutputs) -> None:
        """Reads a form, which takes up to seconds. Raises FormError with what is wrong, and where."""
        try:
            self._matcher(_grammar(asked))
        except FormError as error:
            place = "" if asked.json is None else _place(asked.json, str(error))
            raise FormError(f"{place}{error}") from None

    def begin(self, asked: StructuredOutputs, output: Growing) -> Form:
        """Returns the form of a new output. Raises FormError."""
        self.check(asked)
        matcher = self._matcher(_grammar(asked)).deep_copy()
        return Form(matcher, output, self._num_words, self._eos_token_ids)

    def _new_matcher(self, grammar: str) -> Any:
        """Returns the matcher of a grammar, before any token. Raises FormError."""
        package = _package()
        limits = package.LLParserLimits(verbose_errors=False)
        matcher = package.LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0, limits=limits)
        _bits(matcher.deep_copy(), self._num_words, self._eos_token_ids)  # a form may begin with no token
        return matcher

    def _llguidance_tokenizer(self) -> Any:
        with self._making:
            if self._own is None:
                self._own = self._new_tokenizer()
                self._num_words = -(-self._own.vocab_size // 32)
            return self._own

    def _new_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise FormError("the model has no tokenizer, so its outputs cannot have a form")
        if not self._eos_token_ids:
            raise FormError("the model has no end-of-sequence token, so an output with a form could not end")
        try:
            return _package().LLTokenizer(
                self._tokenizer.to_json(),
                n_vocab=max(self._vocab_size, self._tokenizer.num_ids),
                eos_token=list(self._eos_token_ids),
            )
        except ValueError as error:
            raise FormError(f"llguidance does not take the model's tokenizer: {_short(error)}") from None


def _package() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise FormError(INSTALL) from None


def _bits(matcher: Any, num_words: int, eos_token_ids: Sequence[int]) -> NDArray[np.int32]:
    """Returns a bit for each token that may come next. Raises FormError if there is none."""
    if matcher.is_error():
        raise FormError(_short(matcher.get_error()))
    if not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.int32)
        if matcher.is_error():
            raise FormError(_short(matcher.get_error()))
        if bits.any():
            return bits
    if not matcher.is_accepting():
        raise FormError("no token of the model may come next")
    ends = np.zeros(num_words, np.uint32)
    for token in eos_token_ids:
        ends[token // 32] |= np.uint32(1 << token % 32)
    return ends.view(np.int32)


def _grammar(asked: StructuredOutputs) -> str:
    """Returns a form as llguidance takes it. Raises FormError."""
    package = _package()
    matcher = package.LLMatcher
    if asked.json is not None:
        if asked.json is False:
            raise FormError("the schema is false, which allows no value")
        text = json.dumps({} if asked.json is True else dict(asked.json), ensure_ascii=False)
        _check_size(text)
        made: str = matcher.grammar_from_json_schema(text, overrides=dict(LAYOUT))
        return made
    text = asked.regex or asked.grammar or ""
    if asked.choice is not None:
        text = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in asked.choice)
    _check_size(text)
    if asked.regex is not None:
        made = matcher.grammar_from_lark(f"start: /{package.regex_to_lark(text, 'dw')}/")
        return made
    try:
        made = package.grammar_from("lark" if asked.choice is not None else "grammar", text)
    except (ValueError, RecursionError) as error:
        raise FormError(_short(error)) from None
    return made


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise FormError(f"has {len(text)} characters: at most {MAX_CHARS} are read")


def _short(error: object) -> str:
    text = str(error).removesuffix("<non-verbose/>").strip()
    text = "no text has this form" if text in NOTHING else text
    half = MAX_MESSAGE_CHARS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} ... {text[-half:]}"


def _place(schema: Any, message: str) -> str:
    """Returns where in a schema a mistake is: the deepest part that is wrong in the same way by itself."""
    if not isinstance(schema, Mapping):
        return ""
    package = _package()
    common = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = list(islice(_parts(schema, "#"), MAX_PLACES))
    for pointer, part in sorted(parts, key=lambda each: -each[0].count("/")):
        alone = json.dumps({**common, **part})
        grammar = package.LLMatcher.grammar_from_json_schema(alone, overrides=dict(LAYOUT))
        if _short(package.LLMatcher.validate_grammar(grammar)) == message:
            return f"{pointer}: "
    return ""


def _parts(schema: Any, pointer: str) -> Any:
    """Yields (JSON pointer, part) of the objects in a schema, the schema itself last."""
    pairs = schema.items() if isinstance(schema, Mapping) else enumerate(schema)
    for key, value in pairs:
        if isinstance(value, Mapping | list):
            yield from _parts(value, f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}")
    if isinstance(schema, Mapping):
        yield pointer, schema
