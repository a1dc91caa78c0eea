"""A textbook decoder to which the engine is compared: no cache, no batch, float64."""

import torch

from kernels.int4_weight import Int4Weight, dense_reference
from kernels.rope_angles import rope_frequencies


def eager_logits(
    spec,
    weights,
    tokens,
    rounded=lambda x: x,
    stored=lambda x: x,
    *,
    last_only=False,
    kept=None,
    masked=lambda x: x,
):
    """Computes the logits [T, V] of one sequence's tokens [T].

    rounded: applied to the input of each linear layer of a block; stored: to each head's key or value, [...,
    D]. last_only: computes the last layer for the last token only, and returns its logits [1, V]. kept:
    (sinks, recent tokens, prompt tokens): tokens after the prompt see the sinks and recent tokens only.
    masked: applied to the masked scores of each layer, [heads, queries, keys].
    """
    w = {name: dense(weight) for name, weight in weights.items()}
    length = len(tokens)
    places = torch.arange(length)
    frequencies, factor = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    angles = torch.outer(places.double(), frequencies.double())
    cos, sin = angles.cos() * factor, angles.sin() * factor

    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight

    def turned(x):  # [T, H, D]
        if spec.alibi:
            return x
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)

    def seen(window, rows):
        at = places[rows, None]
        mask = places[None, :] <= at
        if kept is not None:
            num_sinks, num_recent, num_prompt = kept
            recent = places[None, :] > at - num_recent
            mask = mask & (recent | (places[None, :] < num_sinks) | (at < num_prompt))
        return mask if window is None else mask & (places[None, :] > at - window)

    x = w["embedding.weight"][tokens]
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        h = normed(x, w[p + "attention_norm.weight"])
        qkv = rounded(h) @ w[p + "qkv.weight"].T + w.get(p + "qkv.bias", 0)
        q, k, v = qkv.view(length, -1, spec.head_dim).split(
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1
        )
        if spec.qk_norm:
            q, k = normed(q, w[p + "q_norm.weight"]), normed(k, w[p + "k_norm.weight"])
        q, k, v = turned(q), stored(turned(k)), stored(v)
        at = places[:, None] - places[None, :]
        rows = slice(-1, None) if last_only and i == spec.num_layers - 1 else slice(None)
        q, x = q[rows], x[rows]
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        if spec.alibi:  # heads are as many as a power of two
            slopes = 2.0 ** (-8.0 * torch.arange(1, spec.num_heads + 1) / spec.num_heads)
            scores = scores - slopes[:, None, None] * at[rows]
        probabilities = masked(scores.masked_fill(~seen(spec.window(i), rows), float("-inf"))).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", probabilities, v)
        x = x + rounded(attended.flatten(1)) @ w[p + "o.weight"].T
        h = normed(x, w[p + "mlp_norm.weight"])
        if spec.has_experts(i):
            router, gate_up, down = (
                w[f"{p}{of}.weight"] for of in ("router", "experts_gate_up", "experts_down")
            )
            x = x + mixture(spec, h, router, gate_up, down)
        else:
            x = x + mlp(h, w[p + "gate_up.weight"], w[p + "down.weight"], rounded)
    return normed(x, w["norm.weight"]) @ w["head.weight"].T


def mlp(h, gate_up, down, rounded=lambda x: x):
    gate, up = (rounded(h) @ gate_up.T).chunk(2, dim=-1)
    return rounded(gate * torch.sigmoid(gate) * up) @ down.T


def mixture(spec, h, router, gate_up, down):
    """Computes the mixture token by token and expert by expert."""
    out = torch.zeros_like(h)
    for token, shares in enumerate((h @ router.T).softmax(-1)):
        chosen = shares.argsort(descending=True)[: spec.num_experts_per_tok]
        total = shares[chosen].sum() if spec.norm_topk_prob else 1.0
        for e in chosen.tolist():
            out[token] += shares[e] / total * mlp(h[token], gate_up[e], down[e])
    return out


def dense(weight):
    """Returns a weight in float64, dequantised."""
    if isinstance(weight, Int4Weight):
        in_order = dense_reference(weight, torch.float64)
        if weight.order_K is None:
            return in_order
        out = torch.empty_like(in_order)
        out[:, weight.order_K] = in_order
        return out
    if isinstance(weight, tuple):
        values, scales = weight
        return values.double() * scales.double()[..., None]
    return weight.double()
