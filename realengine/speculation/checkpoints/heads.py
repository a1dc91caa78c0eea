"""Medusa's heads, in two layouts.

    published   {i}.{b}.linear.weight, {i}.{b}.linear.bias   block b of head i     {i}.{n}.weight   projection
    vLLM's      blocks.{i}.layers.{b}.weight, .bias if any   block b of head i     lm_heads.{i}.weight

n: the number of blocks. Either may stand behind `medusa_heads.`. A folder may also have config.json, whose
fields are not needed: the tensors say all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from realengine.speculation.checkpoints.source import read_weights, whole
from realengine.speculation.drafter import DrafterContext
from realengine.speculation.settings import DraftSource
from realengine.weights.safetensors import SafetensorsCheckpoint
from realengine.weights.weight import Weight

Block = tuple[torch.Tensor, torch.Tensor | None]
_PUBLISHED = re.compile(r"(medusa_heads\.)?(\d+)\.(\d+)\.linear\.weight")
_IN_VLLM = re.compile(r"(medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.weight")


def load_heads(
    source: DraftSource, context: DrafterContext, num_heads: int
) -> list[tuple[tuple[Block, ...], torch.Tensor]]:
    """Returns the blocks and the projection of every head of a checkpoint; of random weights, num_heads.

    Raises ValueError if there are fewer than num_heads, or if a tensor does not fit the target.
    """
    names = _Names(source, num_heads)
    tensors, _ = read_weights(source, context, lambda checkpoint: names.table(checkpoint, context))
    if names.num_heads < num_heads:
        raise ValueError(
            f"speculative_config: model={source}: has {names.num_heads} heads, and a draft has {num_heads} "
            f"places; set num_speculative_tokens, or the depth of the tree, to at most {names.num_heads}"
        )
    heads = []
    for head in range(names.num_heads):
        blocks = tuple(
            (tensors[f"{head}.{block}.weight"], tensors.get(f"{head}.{block}.bias"))
            for block in range(names.num_blocks)
        )
        heads.append((blocks, tensors[f"{head}.projection"]))
    return heads


class _Names:
    """The tensors of a checkpoint's layout, and how many heads and blocks it has."""

    def __init__(self, source: DraftSource, num_heads: int) -> None:
        self._source = source
        self.num_heads, self.num_blocks = num_heads, 1

    def table(self, checkpoint: SafetensorsCheckpoint | None, context: DrafterContext) -> Sequence[Weight]:
        """Returns the weights of all heads with the names of the checkpoint's layout."""
        layer, projection, pattern = "{i}.{b}.linear", "{i}.{n}.weight", _PUBLISHED
        has_bias = True
        if checkpoint is not None:
            if any(_IN_VLLM.fullmatch(name) for name in checkpoint.shapes):
                layer, projection, pattern = "blocks.{i}.layers.{b}", "lm_heads.{i}.weight", _IN_VLLM
                has_bias = any(name.endswith(".bias") for name in checkpoint.shapes)
            found = [match for name in checkpoint.shapes if (match := pattern.fullmatch(name))]
            numbers = [(int(match[2]), int(match[3])) for match in found]
            if found and found[0][1]:
                layer, projection = found[0][1] + layer, found[0][1] + projection
            if not numbers:
                raise ValueError(
                    f"{checkpoint.path}: has no heads: a Medusa checkpoint has tensors such as "
                    "0.0.linear.weight, or blocks.0.layers.0.weight"
                )
            self.num_heads = 1 + max(head for head, _ in numbers)
            self.num_blocks = 1 + max(block for _, block in numbers)
        hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
        weights = []
        for head in range(self.num_heads):

            def name(of: str, number: int = 0, head: int = head) -> str:
                return of.format(i=head, b=number, n=self.num_blocks)

            for number in range(self.num_blocks):
                block = name(layer, number)
                weights.append(whole(f"{head}.{number}.weight", f"{block}.weight", (hidden, hidden)))
                if has_bias:
                    weights.append(whole(f"{head}.{number}.bias", f"{block}.bias", (hidden,)))
            weights.append(whole(f"{head}.projection", name(projection), (vocab, hidden)))
        return weights
