"""A decoder as a textbook writes it: no cache, no batch, float64. What the engine is held against."""

import torch

from kernels.rope import rope_frequencies


def eager_logits(spec, weights, tokens):
    """Logits [T, V] of one sequence's tokens [T]."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    length = len(tokens)
    places = torch.arange(length)
    mask = places[None, :] <= places[:, None]
    if spec.sliding_window is not None:
        mask &= places[None, :] > places[:, None] - spec.sliding_window
    frequencies, factor = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling)
    angles = torch.outer(places.double(), frequencies.double())
    cos, sin = angles.cos() * factor, angles.sin() * factor

    def normed(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight

    def turned(x):  # [T, H, D]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]], -1)

    x = w["embedding.weight"][tokens]
    for i in range(spec.num_layers):
        p = f"layers.{i}."
        h = normed(x, w[p + "attention_norm.weight"])
        qkv = h @ w[p + "qkv.weight"].T + w.get(p + "qkv.bias", 0)
        q, k, v = qkv.view(length, -1, spec.head_dim).split(
            [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1
        )
        if spec.qk_norm:
            q, k = normed(q, w[p + "q_norm.weight"]), normed(k, w[p + "k_norm.weight"])
        q, k = turned(q), turned(k)
        group = spec.num_heads // spec.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / spec.head_dim**0.5
        probabilities = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", probabilities, v)
        x = x + attended.reshape(length, -1) @ w[p + "o.weight"].T
        h = normed(x, w[p + "mlp_norm.weight"])
        gate, up = (h @ w[p + "gate_up.weight"].T).chunk(2, dim=-1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "down.weight"].T
    return normed(x, w["norm.weight"]) @ w["head.weight"].T
