"""Texts of a form that a request asks for: JSON of a schema, a match of a pattern, a call of a tool.

A text is drawn as short as the form allows, and then with longer strings, lists and repetitions, until it has
about as many tokens as the output is to have. What the form does not allow, and what is not
drawn here (`not`, lookarounds, ...), raises ValueError with the keyword.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import floor, log
from random import Random
from typing import Any

from experiments.serve.approximate_tokenizer import call_text
from experiments.serve.backend import Function, Structure

MAX_DEPTH = 40
MAX_PARTS = 20_000
"""Values and characters of patterns of one text."""
MAX_FILL_TOKENS = 100_000
MAX_TRIES = 4
"""Texts that are drawn to come near the number of tokens."""
UNSUPPORTED = (
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords of JSON Schema by which nothing is drawn."""
FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "a@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/",
    "uuid": "123e4567-e89b-42d3-a456-426614174000",
}


def structured_text(
    structure: Structure,
    draws: Random,
    num_tokens: int,
    max_tokens: int,
    words: Sequence[str],
    count: Callable[[str], int],
) -> str:
    """Returns a text of the form with about num_tokens tokens, as far as the form is open.

    max_tokens: it has no more, if there is such a text. words: of one token each, for strings. count: of the
    tokens of a text. Raises ValueError, with the reason, for a form of which no text is drawn.
    """
    seed = draws.random()

    def drawn(fill: float) -> str:
        writer = _Writer(Random(seed), words, fill)
        try:
            return writer.text_of(structure)
        except (RecursionError, OverflowError):
            raise ValueError("the form is too deep or too large") from None

    best = drawn(0)
    least = count(best)
    target = min(num_tokens, max_tokens - max_tokens // 20, MAX_FILL_TOKENS)
    spare, nearest = target - least, 0
    fill, exponent, before = max(1.0, spare / 8), 1.0, (0.0, 0)
    for _ in range(MAX_TRIES if spare > 0 else 0):
        try:
            text = drawn(fill)
        except ValueError:
            break  # too large, though the shortest is not
        gained = count(text) - least
        if abs(gained - spare) < abs(nearest - spare) and least + gained <= max_tokens:
            best, nearest = text, gained
        if gained <= 0 or gained == before[1] or abs(gained - spare) <= spare / 20:
            break
        # Lists of strings grow faster than their fill: by which power of it, two texts say.
        if before[1] not in (0, gained) and before[0] != fill:
            exponent = min(1.0, max(0.3, log(fill / before[0]) / log(gained / before[1])))
        before = (fill, gained)
        fill = min(max(1.0, fill * (spare / gained) ** exponent), 4.0 * spare)
    return best


class _Writer:
    """Draws one text. fill: words or items that each open string, list or repetition has beyond its least."""

    def __init__(self, draws: Random, words: Sequence[str], fill: float) -> None:
        self._draws = draws
        self._words = words
        self._fill = fill
        self._num_parts = self._repeats = 0
        self._root: Any = {}
        self._characters: dict[int, str] = {}  # those of a class of a pattern, by its id()

    def text_of(self, structure: Structure) -> str:
        if structure.kind == "choice":
            return str(self._draws.choice(structure.value))
        if structure.kind == "regex":
            return self._match(structure.value)
        if structure.kind == "json":
            return self._document(structure.value)
        if structure.kind == "grammar":
            raise ValueError(
                "grammars are not drawn from; ask for a JSON schema, a regular expression or a choice, or "
                "start the server with backend=engine"
            )
        function: Function = self._draws.choice(structure.value)
        schema = {"type": "object"} if function.schema in ({}, True) else function.schema
        return call_text({"name": function.name, "arguments": self._document(schema)})

    def _document(self, schema: Any) -> str:
        self._root = schema
        return json.dumps(self._value(schema, 0), ensure_ascii=False)

    def _count(self, parts: int = 1) -> None:
        self._num_parts += parts
        if self._num_parts > MAX_PARTS:
            raise ValueError(f"its shortest text has more than {MAX_PARTS} values")

    def _value(self, schema: Any, depth: int) -> Any:
        self._count()
        if depth > MAX_DEPTH:
            raise ValueError(f"its values are nested more than {MAX_DEPTH} deep")
        if schema is True:
            schema = {"type": "string"}
        if not isinstance(schema, Mapping):
            raise ValueError(f"{str(schema)[:60]}: allows no value, or is no schema")
        for keyword in UNSUPPORTED:
            if keyword in schema:
                raise ValueError(f"the keyword {keyword} is not supported")
        if "$ref" in schema:
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self._value(_merged([self._resolved(schema["$ref"]), rest]), depth + 1)
        if "allOf" in schema:
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            return self._value(_merged([*_list(schema, "allOf"), rest]), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._draws.choice(_list(schema, "enum"))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._branch(schema, keyword, depth)
        return self._of_type(self._type(schema), schema, depth)

    def _branch(self, schema: Mapping[str, Any], keyword: str, depth: int) -> Any:
        """Draws one of several schemas; one that leads too deep gives way to the next."""
        branches = list(_list(schema, keyword))
        rest = {key: value for key, value in schema.items() if key != keyword}
        first = self._draws.randrange(len(branches)) if depth < 4 else 0
        failure: ValueError | None = None
        for branch in sorted(branches[first:] + branches[:first], key=lambda each: _size(each, depth)):
            try:
                return self._value(_merged([branch, rest]), depth + 1)
            except ValueError as error:
                failure = failure or error
        raise failure or ValueError(f"{keyword}: must not be empty")

    def _resolved(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise ValueError(f"$ref: {str(reference)[:60]}: must begin with #")
        found = self._root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise ValueError(f"$ref: {reference[:60]}: is not in the schema")
            found = found[name]
        return found

    def _type(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kinds = [each for each in kind if each != "null"] or kind
            kind = self._draws.choice(kinds)
        if kind is not None:
            return str(kind)
        hints = {
            "object": ("properties", "required", "additionalProperties"),
            "array": ("items", "prefixItems", "minItems"),
            "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        }
        return next((name for name, keys in hints.items() if any(key in schema for key in keys)), "string")

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, is_whole=kind == "integer")
        if kind == "boolean":
            return self._draws.random() < 0.5
        if kind == "null":
            return None
        raise ValueError(f"type: {kind[:40]}: is no type of JSON")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise ValueError("properties must be an object, and required a list")
        others = schema.get("additionalProperties", True)
        found: dict[str, Any] = {}
        for name, each in properties.items():
            if name in required:
                found[name] = self._value(each, depth + 1)
            elif depth < 4:
                try:
                    found[name] = self._value(each, depth + 1)
                except ValueError:
                    continue  # an optional property without a finite value
        for name in required:
            if name not in found:
                found[str(name)] = self._value(others, depth + 1)
        wanted = max(_whole(schema, "minProperties", 0), 0 if properties or others is False else 1)
        for number in range(len(found), wanted):
            found[f"key{number}"] = self._value(others, depth + 1)
        if len(found) > _whole(schema, "maxProperties", len(found)):
            found = {name: value for name, value in found.items() if name in required}
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first = schema.get("prefixItems", [])
        first = first if isinstance(first, list) else []
        items = schema.get("items", True)
        least = max(_whole(schema, "minItems", 0), len(first) if depth < 4 else 0)
        most = len(first) if items is False else _whole(schema, "maxItems", 1 << 40)
        if least > most:
            raise ValueError(f"minItems={least}: must be at most maxItems={most}")
        wanted = max(least, 1 if depth < 4 else 0) + floor(self._fill / 8 if depth < 4 else 0)
        self._count(least)
        found: list[Any] = []
        for place in range(min(wanted, most)):
            try:
                found.append(self._value(first[place] if place < len(first) else items, depth + 1))
            except ValueError:
                if place < least:
                    raise
                break
            if schema.get("uniqueItems") is True and found[-1] in found[:-1]:
                found.pop()
                if place < least:
                    raise ValueError("uniqueItems: so many different items are not drawn")
                break
        return found

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _whole(schema, "minLength", 0), _whole(schema, "maxLength", 1 << 40)
        if least > most:
            raise ValueError(f"minLength={least}: must be at most maxLength={most}")
        self._count(least)
        if "pattern" in schema:
            fills = (self._fill, 0, 1, 2, 4, 8, 16, 32, 64, least // 2, least, min(most, 1000))
            texts = (self._match(schema["pattern"], fill) for fill in fills)
            found = next((text for text in texts if least <= len(text) <= most), None)
            if found is None:
                raise ValueError(f"no match of the pattern has {least} to {most} characters")
            return found
        if schema.get("format") in FORMATS:
            return FORMATS[schema["format"]]
        num_words = max(1, min(floor(self._fill), most))
        text = "".join(self._draws.choices(self._words, k=num_words)).strip()
        if len(text) > most:
            text = text[: text.rfind(" ", 0, most + 1)] if " " in text[: most + 1] else text[:most]
        return text.ljust(least, "a")

    def _number(self, schema: Mapping[str, Any], *, is_whole: bool) -> float:
        step = _real(schema, "multipleOf") or 1
        if is_whole and step % 1:
            raise ValueError(f"multipleOf={step:g}: of an integer, only whole numbers are supported")
        step = int(step) if step % 1 == 0 else step
        least, above = _real(schema, "minimum"), _real(schema, "exclusiveMinimum")
        most, below = _real(schema, "maximum"), _real(schema, "exclusiveMaximum")
        low = max([each for each in (least, above) if each is not None], default=None)
        high = min([each for each in (most, below) if each is not None], default=None)
        if low is None:
            low = 0 if high is None else min(0, high - 100 * step)
        if high is None:
            high = low + 100 * step
        first, last = int(-(-low // step)), int(high // step)
        first += first * step == above
        last -= last * step == below
        if first <= last:
            return self._draws.randint(first, last) * step
        if is_whole or "multipleOf" in schema or low > high or (low == high and low in (above, below)):
            raise ValueError(f"no such number is a multiple of {step:g} from {low:g} to {high:g}")
        return low + (high - low) * self._draws.choice((0.25, 0.5, 0.75))

    # Regular expressions.

    def _match(self, pattern: Any, fill: float | None = None) -> str:
        """Returns a text that a pattern matches as a whole. fill: of its repetitions; None: as elsewhere."""
        self._repeats = floor(self._fill if fill is None else fill)
        self._characters.clear()  # the parts of another pattern may have had the same ids
        parser = import_module("re._parser")
        try:
            parsed = list(parser.parse(str(pattern)))
        except (re.error, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"the pattern {str(pattern)[:60]!r} cannot be read: {error}") from None
        if parsed and str(parsed[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            parsed = parsed[1:]
        if parsed and str(parsed[-1][1]) in ("AT_END", "AT_END_STRING"):
            parsed = parsed[:-1]
        return self._sequence(parsed)

    def _sequence(self, parsed: Any) -> str:
        return "".join(self._part(str(kind), value) for kind, value in parsed)

    def _part(self, kind: str, value: Any) -> str:
        self._count()
        if kind == "LITERAL":
            return chr(value)
        if kind == "ANY":
            return self._draws.choice("abcdefgh ")
        if kind == "IN":
            return self._character(value)
        if kind == "NOT_LITERAL":
            return "b" if value == ord("a") else "a"
        if kind == "BRANCH":
            return self._sequence(self._draws.choice(value[1]))
        if kind in ("SUBPATTERN", "ATOMIC_GROUP"):
            return self._sequence(value[-1] if kind == "SUBPATTERN" else value)
        if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = int(value[0]), int(value[1]), value[2]
            wanted = least + self._repeats if most - least > 1 else self._draws.randint(least, most)
            self._count(min(wanted, most))
            return "".join(self._sequence(inner) for _ in range(min(wanted, most)))
        raise ValueError(f"{kind.lower()} in a regular expression is not supported")

    def _character(self, allowed: Any) -> str:
        """Returns a character of a class, a readable one if there is one."""
        if id(allowed) in self._characters:
            return self._draws.choice(self._characters[id(allowed)])
        rules = [(str(kind), value) for kind, value in allowed]
        is_negated = rules[0][0] == "NEGATE"
        own = [chr(value) for kind, value in rules if kind == "LITERAL"]
        own += [chr(value[0]) for kind, value in rules if kind == "RANGE"]
        readable = [chr(code) for code in range(32, 127)]
        found = [each for each in readable if _is_in(each, rules) != is_negated]
        if not found and not is_negated:
            found = own
        if not found:
            raise ValueError("a class of characters without a readable one is not supported")
        self._characters[id(allowed)] = "".join(found)
        return self._draws.choice(found)


def _is_in(char: str, rules: Sequence[tuple[str, Any]]) -> bool:
    """Returns whether one of the rules of a class names a character."""
    code = ord(char)
    for kind, value in rules:
        if kind == "LITERAL" and code == value:
            return True
        if kind == "RANGE" and value[0] <= code <= value[1]:
            return True
        if kind == "CATEGORY":
            name = str(value)
            is_it = (char.isdigit(), char.isspace(), char.isalnum() or char == "_")
            holds = is_it[("DIGIT" in name, "SPACE" in name, "WORD" in name).index(True)]
            if holds != ("NOT" in name):
                return True
    return False


def _merged(schemas: Sequence[Any]) -> Any:
    """Returns one schema in place of several that hold at once."""
    found: dict[str, Any] = {}
    for schema in schemas:
        if schema is True:
            continue
        if not isinstance(schema, Mapping):
            raise ValueError(f"{str(schema)[:60]}: allows no value, or is no schema")
        for key, value in schema.items():
            before = found.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                found[key] = {**before, **value}
            elif key == "required" and isinstance(before, list) and isinstance(value, list):
                found[key] = [*before, *value]
            elif key in ("minimum", "minLength", "minItems") and before is not None:
                found[key] = max(before, value)
            elif key in ("maximum", "maxLength", "maxItems") and before is not None:
                found[key] = min(before, value)
            else:
                found[key] = value
    return found


def _size(schema: Any, depth: int) -> int:
    """Returns the order in which branches are tried: at a depth, those without parts come first."""
    return 0 if depth < 4 else len(json.dumps(schema)) * ("$ref" in json.dumps(schema))


def _list(schema: Mapping[str, Any], keyword: str) -> Sequence[Any]:
    value = schema[keyword]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{keyword}: must be a list that is not empty")
    return value


def _whole(schema: Mapping[str, Any], keyword: str, default: int) -> int:
    value = schema.get(keyword, default)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{keyword}: must be a whole number >= 0")
    return value


def _real(schema: Mapping[str, Any], keyword: str) -> float | None:
    value = schema.get(keyword)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"{keyword}: must be a number")
    return value
