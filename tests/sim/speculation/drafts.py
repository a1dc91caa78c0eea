"""Proposers and requests for tests of acceptance models."""

from dataclasses import dataclass
from typing import ClassVar

from policies.core.request import Prompt, Request
from policies.speculation import SlotRules, TokenTree


@dataclass(frozen=True)
class Drafts:
    """A proposer of which only the shape of the drafts matters."""

    num_speculative_tokens: int
    tree: TokenTree | None = None
    method: ClassVar[str] = "draft_model"
    rules: ClassVar[SlotRules] = SlotRules()
    draft: ClassVar[None] = None


def chain(num_tokens):
    return Drafts(num_tokens)


def tree(*widths):
    nodes = TokenTree.of_widths(list(widths))
    return Drafts(nodes.num_nodes, nodes)


def request(request_id=0, **fields):
    return Request(request_id, 0.0, fields.pop("prompt", Prompt(16)), **fields)


def passes(verdicts, num_tokens):
    """Returns the accepted tokens of each pass of a sequence that drafts num_tokens tokens in every pass."""
    accepted, position = [], 1
    while position < len(verdicts.accepted):
        accepted.append(min(int(verdicts.accepted[position]), num_tokens))
        position += accepted[-1] + 1
    return accepted
