"""A transformation to a smaller KV cache: fewer KV heads, interleaved windows, KV shared by layers.

"Optimizing AI Inference at Character.AI", 2024: multi-query attention in all layers; one layer of six attends
to the whole context, the others to a window of 1,024 tokens; two or three neighbouring layers share one
cache, and layers with full attention share across blocks. Cross-layer attention: Brandon et al., NeurIPS
2024.

KV bytes of a sequence of n tokens, of L layers with b bytes per token, window w, one of f full, s sharing:

    L / s (n / f + (1 - 1 / f) min(n, w)) b,   each kind of layer rounded up to whole layers

30 layers of 8 KV heads, 10,240 tokens: 5 layers are full, 25 have a window of 1,024, which keeps a tenth. Of
the full ones 2 have a cache, of the others 9. So KV is 8 (heads) x 30 x 10 / (2 x 10 + 9) = 83 times smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from fieldlimits import Checked, PositiveInt
from hwmodels.model.attention import GroupedQueryAttention
from hwmodels.model.model_spec import Block, ModelSpec
from hwmodels.model.transforms import Quality, noted


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedKv(Checked):
    """Multi-query attention, windows and shared KV in all layers with grouped-query attention.

    Latent and linear attention stay as they are. A model like this is trained, not converted.
    """

    num_kv_heads: PositiveInt | None = 1
    """Number of KV heads; None: those of the model."""
    window: PositiveInt | None = 1024
    """Tokens to which most layers attend; None: no layer gets a window."""
    full_every: PositiveInt = 6
    """One of so many layers attends to the whole context, if there is a window."""
    layers_per_kv: PositiveInt = 3
    """Number of layers of the same kind that share one cache; 1: each has its own."""
    quality: Quality = None
    """Share of the original's benchmark score that is kept, as measured elsewhere; None: unknown."""

    def applied(self, model: ModelSpec) -> ModelSpec:
        """Returns the model with its smaller cache. Raises ValueError if num_kv_heads does not divide."""
        blocks = tuple(part for block in model.blocks for part in self._parts(block))
        smaller = replace(model, name=f"{model.name}-shared-kv", source="", blocks=blocks)
        window = "no window" if self.window is None else f"a window of {self.window:,} tokens in most layers"
        heads = "unchanged" if self.num_kv_heads is None else self.num_kv_heads
        sharing = f"one cache for up to {self.layers_per_kv} layers"
        return noted(smaller, f"KV heads: {heads}, {window}, {sharing}", model, self.quality)

    def _parts(self, block: Block) -> Iterator[Block]:
        """Yields the layers of a block by window, those with a cache before those that share it."""
        attention = block.attention
        if not isinstance(attention, GroupedQueryAttention) or attention.shares_kv:
            yield block
            return
        if self.num_kv_heads is not None:
            attention = replace(attention, num_kv_heads=self.num_kv_heads)
        num_full = block.count if self.window is None else ceil(block.count / self.full_every)
        widths = [width for width in (self.window, attention.window) if width is not None]
        of_window = replace(attention, window=min(widths, default=None))
        for kind, count in ((attention, num_full), (of_window, block.count - num_full)):
            num_own = ceil(count / self.layers_per_kv)
            for layers, num_layers in ((kind, num_own), (replace(kind, shares_kv=True), count - num_own)):
                if num_layers:
                    yield replace(block, attention=layers, count=num_layers)
