"""Plain models of the layers that draft, which compute from the whole text."""

import torch
import torch.nn.functional as F

from kernels.rope_angles import rope_frequencies
from realengine.model.backend import TORCH
from realengine.runner.parallel import Group
from realengine.speculation.drafter import DrafterContext
from tests.realengine.model.test_decoder import CPU, cache_of, make
from tests.realengine.speculation.passes import Row, Sequences

torch.set_num_threads(1)


MAX_LEN = 64


def context_of(config="llama"):
    spec, _, decoder = make(config)
    context = DrafterContext(
        target=decoder,
        architecture=spec,
        source=None,
        backend=TORCH,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        device=CPU,
        group=Group(),
        block_size=4,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        seed=5,
    )
    return context, cache_of(spec, num_blocks=70)


def whole_states(context, tokens, taps=()):
    """Computes the target's hidden states of a text with an empty cache."""
    seqs = Sequences(70, 4, MAX_LEN, 1)
    passed = seqs.passed([Row(0, tokens, len(tokens), 1, is_decode=False)])
    return context.target.states(passed.batch, cache_of(context.architecture, num_blocks=70), taps=taps)


def layer(spec, weights, read, residual, at=0):
    """Computes a layer in plain torch: its attention reads `read`, and its output is added to `residual`."""
    own = {
        name.removeprefix(f"layers.{at}."): w.double()
        for name, w in weights.items()
        if name.startswith(f"layers.{at}.")
    }
    length, dim = len(read), spec.head_dim
    frequencies, factor = rope_frequencies(dim, spec.rope_theta, spec.rope_scaling)
    angles = torch.outer(torch.arange(length).double(), frequencies.double())
    cos, sin = (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]

    def turned(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = (
        (read @ own["qkv.weight"].T)
        .view(length, -1, dim)
        .split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
    )
    group = spec.num_heads // spec.num_kv_heads
    q, k, v = turned(q), turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    mask = torch.ones(length, length).tril().bool()
    attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    hidden = residual + attended.reshape(length, -1) @ own["o.weight"].T
    gate, up = (normed(hidden, own["mlp_norm.weight"], spec) @ own["gate_up.weight"].T).chunk(2, -1)
    return hidden + (F.silu(gate) * up) @ own["down.weight"].T


def normed(x, weight, spec):
    return x / (x.square().mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight.double()


class Plain:
    """A layer that drafts, without a cache: the features of a text are computed anew for every token."""

    def __init__(self, kind, context, weights):
        self.kind, self.context, self.spec = kind, context, weights.architecture
        self.w, self.offsets, self.options = weights.tensors, weights.token_offsets, weights.options
        self.taps = weights.options.taps if kind == "eagle3" else ()

    def features(self, states):
        if self.kind == "eagle3":
            return torch.cat(states.taps, -1).double() @ self.w["fc.weight"].double().T
        return states.hidden_TH.double()

    def run(self, following, features):
        embedded = self.context.target.embed(torch.tensor(following)).double()
        if self.kind == "eagle":
            x = torch.cat([embedded, features], -1) @ self.w["fc.weight"].double().T
            return layer(self.spec, self.w, x, x)
        if self.kind == "eagle3":
            read = torch.cat(
                [
                    normed(embedded, self.w["layers.0.attention_norm.weight"], self.spec),
                    normed(features, self.w["layers.0.hidden_norm.weight"], self.spec),
                ],
                -1,
            )
            half = read[:, features.shape[1] :]
            return layer(self.spec, self.w, read, half if self.options.norm_before_residual else features)
        both = torch.cat(
            [
                normed(embedded, self.w["0.enorm.weight"], self.spec),
                normed(features, self.w["0.hnorm.weight"], self.spec),
            ],
            -1,
        )
        x = both @ self.w["0.proj.weight"].double().T
        return layer(self.spec, self.w, normed(x, self.w["layers.0.attention_norm.weight"], self.spec), x)

    def logits(self, feature):
        if self.kind == "eagle3":
            return normed(feature, self.w["norm.weight"], self.spec) @ self.w["head.weight"].double().T
        if self.kind == "mtp":
            feature = normed(feature, self.w["0.norm.weight"], self.spec)
        return self.context.target.head(feature.float()).double()

    def ranked(self, known, path, num):
        """Returns the num likeliest tokens after a text and a path of drafted tokens."""
        states = whole_states(self.context, known[:-1], self.taps)
        features, following = self.features(states), list(known[1:])
        for token in path:
            out = self.run(following, features)
            features, following = torch.cat([features, out[-1:]]), [*following, token]
        tokens = self.logits(self.run(following, features)[-1]).topk(num).indices
        return (tokens if self.offsets is None else tokens + self.offsets[tokens]).tolist()


class PlainHeads:
    """Medusa's heads in plain torch."""

    def __init__(self, context, heads):
        self.context, self.heads = context, heads

    def ranked(self, known, path, num):
        x = whole_states(self.context, known[:-1]).hidden_TH[-1]
        blocks, projection = self.heads[len(path)]
        for weight, bias in blocks:
            x = x + F.silu(weight @ x + bias)
        return (projection @ x).topk(num).indices.tolist()
