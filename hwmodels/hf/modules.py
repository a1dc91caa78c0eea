"""The modules of a layer under the names of checkpoints, and patterns that name some of them.

Checkpoints name what they leave unquantised, or store in another format, by modules of transformers
(`model.layers.3.self_attn.q_proj`), by parts of such names, by wildcards and by regular expressions. Names
differ between families; a matrix of ours has all of them.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hwmodels.hf.fields import shown, wrong

PREFIXES = (
    "model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.decoder.",
    "transformer.",
    "backbone.",
    "",
)
"""What names of a language model's layers begin with, the usual one first."""

ATTENTION = ("self_attn", "linear_attn", "attn", "attention", "mixer")
DENSE = ("mlp", "ffn", "feed_forward", "mixer", "block_sparse_moe")
EXPERTS = tuple(
    f"{inside}experts"
    for inside in ("mlp.", "ffn.", "feed_forward.", "block_sparse_moe.", "mixer.", "moe.", "")
)
SHARED = tuple(
    f"{inside}{name}"
    for inside in ("mlp.", "ffn.", "feed_forward.", "block_sparse_moe.", "mixer.", "moe.", "")
    for name in ("shared_experts", "shared_expert", "share_expert", "shared_mlp")
)

UP, GATE, DOWN = ("up_proj", "gate_up_proj", "w3"), ("gate_proj", "gate_up_proj", "w1"), ("down_proj", "w2")
OF_ATTENTION = {
    "qkv_proj": (("q_proj", "qkv_proj", "wq"), ("k_proj", "qkv_proj", "wk"), ("v_proj", "qkv_proj", "wv")),
    "o_proj": (("o_proj", "out_proj", "wo"),),
    "qkv_a_proj": (("q_a_proj", "wq_a"), ("kv_a_proj_with_mqa", "wkv_a", "wkv")),
    "kv_a_proj": (("kv_a_proj_with_mqa", "wkv_a", "wkv"),),
    "q_b_proj": (("q_b_proj", "wq_b"),),
    "kv_b_proj": (("kv_b_proj", "wkv_b"),),
    "index_q_proj": (("indexer.wq_b",),),
    "index_k_proj": (("indexer.wk",),),
    "index_qk_proj": (("index_q_proj",), ("index_k_proj",)),
    "compressor_proj": (("compressor.wkv",), ("compressor.wgate",)),
    "o_a_proj": (("o_a_proj", "wo_a"),),
    "o_b_proj": (("o_b_proj", "wo_b"),),
    "in_proj_qkv": (("q_proj",), ("k_proj",), ("v_proj",)),
    "latent_down_proj": (("fc1_latent_proj", "routed_expert_down_proj"),),
    "latent_up_proj": (("fc2_latent_proj", "routed_expert_up_proj"),),
    "in_proj_qkvz": (("in_proj_qkv", "in_proj_qkvz"), ("in_proj_z", "in_proj_qkvz")),
}
"""Matrix of ours -> for each of the matrices that it joins: its names in checkpoints."""

OF_MLP = {"gate_up_proj": (GATE, UP), "up_proj": (UP,), "down_proj": (DOWN,)}

HEAD = ("lm_head", "language_model.lm_head", "model.lm_head", "head")

MOST_REGEXES = 2_000
MOST_REPETITIONS = 6
"""Unbounded repetitions in one regular expression; more could take forever on a name that does not match."""

_STRIPPED = re.compile("|".join(re.escape(prefix) for prefix in sorted(PREFIXES, key=len, reverse=True)))
_REGEX = re.compile(r"^\.\*|[\\^$(|+]")
"""Finds what only regular expressions have; model.layers.1.* is a wildcard of layer 1, not of layer 10."""
_NESTED = re.compile(r"\([^()]*[*+{][^()]*\)\s*[*+{]")


class Names(NamedTuple):
    """Names of the modules in layers: the containers in which attention, MLPs and experts may lie."""

    attention: tuple[str, ...]
    dense: tuple[str, ...]
    experts: tuple[str, ...]
    shared: tuple[str, ...]

    def parts(self, layer: int, matrix: str) -> list[list[str]]:
        """Returns the full names of each of the matrices that a matrix of ours joins."""
        places = list[tuple[tuple[str, ...], tuple[str, ...]]]()
        for start, containers in (("expert_", self.experts), ("shared_", self.shared), ("", self.dense)):
            of_mlp = OF_MLP.get(matrix.removeprefix(start)) if matrix.startswith(start) else None
            if of_mlp is not None:
                numbered = start == "expert_"
                places = [
                    (containers, (*(f"0.{leaf}" for leaf in leaves if numbered), *leaves))
                    for leaves in of_mlp
                ]
                break
        else:
            places = [(self.attention, leaves) for leaves in OF_ATTENTION.get(matrix, ((matrix,),))]
        return [
            [f"layers.{layer}.{inside}.{leaf}" for inside in containers for leaf in leaves]
            for containers, leaves in places
        ]


def names_in(text: str, *, experts_beside_mlp: bool = False) -> Names:
    """Returns the names that a checkpoint's patterns can tell apart: usual containers, and those in text.

    text: all patterns. experts_beside_mlp: the experts are beside a dense `mlp` instead of in it (Gemma 4).
    """

    def used(containers: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            name
            for place, name in enumerate(containers)
            if place == 0 or all(word in text for word in name.split("."))
        )

    experts = ("experts",) if experts_beside_mlp else used(EXPERTS)
    return Names(used(ATTENTION), used(DENSE), experts, used(SHARED))


@dataclass(frozen=True)
class Modules:
    """Patterns of modules' names: a name or a part of one, wildcards (*), or a regular expression (re:)."""

    plain: frozenset[str] = frozenset()
    globs: re.Pattern[str] | None = None
    regexes: tuple[re.Pattern[str], ...] = ()
    prefixes: tuple[str, ...] = field(default=PREFIXES[:1])

    def match(self, names: Iterable[str]) -> bool:
        """Returns whether a pattern names one of these modules or a module that holds it."""
        return any(self._matches(name) for name in names)

    def _matches(self, name: str) -> bool:
        if self.plain:
            words = name.split(".")
            for start in range(len(words)):
                for end in range(start + 1, len(words) + 1):
                    if ".".join(words[start:end]) in self.plain:
                        return True
        for prefix in self.prefixes if self.globs or self.regexes else ():
            full = f"{prefix}{name}"
            if self.globs is not None and self.globs.match(full):
                return True
            if any(regex.match(full) for regex in self.regexes):
                return True
        return False


def modules(where: str, patterns: Iterable[str]) -> Modules:
    """Returns the modules that the patterns name. Raises ValueError that names the field `where`."""
    plain, globs, regexes, used = set[str](), list[str](), list[re.Pattern[str]](), {PREFIXES[0]}
    for pattern in patterns:
        used |= {prefix for prefix in PREFIXES if prefix and prefix in pattern}
        if pattern.startswith("re:"):
            regexes.append(regular_expression(where, pattern[3:]))
        elif "*" in pattern or "?" in pattern:
            if _REGEX.search(pattern):
                regexes += readable_as_regex(pattern)
            translated = fnmatch.translate(pattern).removesuffix(r"\Z")
            globs.append(rf"{translated}(?:\..*)?\Z")
        else:
            name = pattern.removesuffix(".weight").strip(".")
            plain.add(_STRIPPED.sub("", name, count=1) if _STRIPPED.match(name) else name)
    if len(regexes) > MOST_REGEXES:
        raise ValueError(
            f"{where}: holds {len(regexes):,} regular expressions; at most {MOST_REGEXES:,} are read"
        )
    joined = re.compile("|".join(f"(?:{one})" for one in dict.fromkeys(globs))) if globs else None
    # Names that no prefix of a language model starts may begin a pattern, as in layers.0.ffn.experts.
    prefixes = tuple(prefix for prefix in PREFIXES if prefix in used or not prefix)
    return Modules(frozenset(plain - {""}), joined, tuple(regexes), prefixes)


def regular_expression(where: str, text: str) -> re.Pattern[str]:
    """Compiles an expression of a checkpoint. Raises ValueError if it is none, or could take too long."""
    if (
        _NESTED.search(text)
        or len(re.findall(r"(?<!\\)[*+]|\{\d*,\}", text)) > MOST_REPETITIONS
        or len(text) > 2_000
    ):
        raise wrong(
            where, f"re:{text}", f"must have at most {MOST_REPETITIONS} repetitions (* or +), and none nested"
        )
    try:
        return re.compile(re.sub(r"(?:\.\*){2,}", ".*", text))
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(where, f"re:{text}", f"is no regular expression: {error}") from None


def readable_as_regex(pattern: str) -> list[re.Pattern[str]]:
    """Returns the expression that a pattern with wildcards may be instead; none if it is none."""
    try:
        return [regular_expression("", pattern)]
    except ValueError:
        return []


def listed(where: str, given: Any) -> list[str]:
    """Returns the patterns of a field: a list of texts, or one text. Raises ValueError."""
    if given is None:
        return []
    if isinstance(given, str):
        return [given]
    if not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        raise ValueError(f"{where}={shown(given)}: must be a list of names of modules")
    return given
