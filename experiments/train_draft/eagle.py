"""EAGLE's layer on a frozen target: Li et al., ICML 2024, section 4.2.

The layer reads fc([embedding of token t + 1; hidden state t]) and is trained to return hidden state t + 1, of
which the target's head predicts token t + 2:

    loss = smooth L1(state, hidden state t + 1) + cross-entropy(E state, token t + 2)

The hidden states that it reads get uniform noise, because after the first draft token they are its own. At
the start fc passes the hidden state on, and attention and MLP add little to it.

Letters of array names: B texts, L tokens of the longest, N rows of answers, H hidden size, D head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from experiments.train_draft.fit import fit
from experiments.train_draft.settings import TrainSettings
from experiments.train_draft.texts import Corpus
from kernels.rope_angles import cos_sin_table
from realengine.model.architecture import Architecture

TEXTS_OF_A_BATCH = 4
NOISE = 0.1
"""Largest noise, as a share of the hidden states' standard deviation."""
STD = 0.02
FILE = "model.safetensors"


class EagleLayer(torch.nn.Module):
    """The layer, which computes whole texts at once; its parameters have their published names."""

    def __init__(self, architecture: Architecture, max_len: int, device: torch.device, seed: int) -> None:
        super().__init__()
        self._architecture = architecture
        hidden, size, dim = architecture.hidden_size, architecture.intermediate_size, architecture.head_dim
        generator = torch.Generator().manual_seed(seed)

        def drawn(rows: int, columns: int) -> torch.Tensor:
            return STD * torch.randn(rows, columns, generator=generator)

        layer = "layers.0."
        started = {
            "fc.weight": torch.cat([drawn(hidden, hidden), torch.eye(hidden)], dim=1),
            f"{layer}self_attn.q_proj.weight": drawn(architecture.num_heads * dim, hidden),
            f"{layer}self_attn.k_proj.weight": drawn(architecture.num_kv_heads * dim, hidden),
            f"{layer}self_attn.v_proj.weight": drawn(architecture.num_kv_heads * dim, hidden),
            f"{layer}self_attn.o_proj.weight": drawn(hidden, architecture.num_heads * dim),
            f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
            f"{layer}mlp.gate_proj.weight": drawn(size, hidden),
            f"{layer}mlp.up_proj.weight": drawn(size, hidden),
            f"{layer}mlp.down_proj.weight": drawn(hidden, size),
        }
        self.trained = {name: torch.nn.Parameter(each.to(device)) for name, each in started.items()}
        angles = cos_sin_table(
            dim, max_len, base=architecture.rope_theta, scaling=architecture.rope_scaling, device=device
        )
        self._cos_LD, self._sin_LD = angles.chunk(2, dim=1)

    def forward(self, embedded_BLH: torch.Tensor, hidden_BLH: torch.Tensor) -> torch.Tensor:
        """Computes the states [B, L, H] from the embeddings of tokens t + 1 and the hidden states at t."""
        spec, of = self._architecture, self._of
        x_BLH = F.linear(torch.cat([embedded_BLH, hidden_BLH], dim=-1), self.trained["fc.weight"])
        shape = (*x_BLH.shape[:2], -1, spec.head_dim)
        q, k, v = (of(f"self_attn.{name}_proj", x_BLH).view(shape).transpose(1, 2) for name in "qkv")
        attended = F.scaled_dot_product_attention(
            self._rotated(q), self._rotated(k), v, is_causal=True, enable_gqa=True
        )
        x_BLH = x_BLH + of("self_attn.o_proj", attended.transpose(1, 2).flatten(2))
        norm = self.trained["layers.0.post_attention_layernorm.weight"]
        read_BLH = F.rms_norm(x_BLH, norm.shape, norm, spec.rms_norm_eps)
        gated = F.silu(of("mlp.gate_proj", read_BLH)) * of("mlp.up_proj", read_BLH)
        return x_BLH + of("mlp.down_proj", gated)

    def _of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.trained[f"layers.0.{name}.weight"])

    def _rotated(self, x_BHLD: torch.Tensor) -> torch.Tensor:
        """Rotates heads by their positions, in pairs i, i + D / 2."""
        length = x_BHLD.shape[2]
        cos, sin = self._cos_LD[:length], self._sin_LD[:length]
        first, second = x_BHLD.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def train(
    corpus: Corpus, settings: TrainSettings, folder: Path, report: Callable[[str], None]
) -> list[list[float]]:
    """Trains the layer and writes it; returns its losses by epoch, as a list of one."""
    chosen = [n for n, text in enumerate(corpus.texts) if len(text.tokens) - text.num_prompt_tokens >= 2]
    if not chosen:
        raise ValueError("no answer has two tokens, which a layer needs; set num_tokens higher")
    device = corpus.hidden_TH.device
    max_len = max(len(text.tokens) for text in corpus.texts)
    layer = EagleLayer(corpus.architecture, max_len, device, settings.seed)
    noise = NOISE * float(corpus.hidden_TH.std())
    generator = torch.Generator(device).manual_seed(settings.seed)

    def loss_of(numbers: torch.Tensor) -> torch.Tensor:
        rows_BL, is_answer_BL = _rows(corpus, [chosen[number] for number in numbers.tolist()])
        read_BLH = corpus.hidden_TH[rows_BL]
        drawn_BLH = torch.rand(read_BLH.shape, generator=generator, device=device)
        embedded_BLH = corpus.embedding_UH[corpus.words_T[rows_BL + 1]]
        states_NH = layer(embedded_BLH, read_BLH + noise * (2 * drawn_BLH - 1))[is_answer_BL]
        rows_N = rows_BL[is_answer_BL]
        missed = F.smooth_l1_loss(states_NH, corpus.hidden_TH[rows_N + 1])
        words_N = corpus.words_T[rows_N + 2]
        return missed + F.cross_entropy(F.linear(states_NH, corpus.head_UH), words_N)

    parameters = layer.trained.values()
    losses = fit(
        parameters,
        len(chosen),
        loss_of,
        settings,
        batch_size=TEXTS_OF_A_BATCH,
        report=lambda line: report(f"eagle, {line}"),
    )
    folder.mkdir(parents=True)
    tensors = {name: each.detach().bfloat16().cpu() for name, each in layer.trained.items()}
    save_file(tensors, folder / FILE)
    config = json.dumps(_config(corpus.architecture), indent=2)
    (folder / "config.json").write_text(config + "\n", encoding="utf-8")
    return [losses]


def _rows(corpus: Corpus, numbers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows t [B, L] of texts, and which predict a token t + 2 of an answer.

    A text of n tokens has rows 0 to n - 3; rows behind them repeat the last one and are not answers.
    """
    device = corpus.hidden_TH.device
    lengths = torch.tensor([len(corpus.texts[number].tokens) - 2 for number in numbers], device=device)
    firsts = torch.tensor([corpus.texts[number].num_prompt_tokens - 1 for number in numbers], device=device)
    starts = torch.tensor([corpus.starts[number] for number in numbers], device=device)
    places_L = torch.arange(int(lengths.max()), device=device)
    rows_BL = starts[:, None] + torch.minimum(places_L, lengths[:, None] - 1)
    return rows_BL, (places_L >= firsts[:, None]) & (places_L < lengths[:, None])


def _config(architecture: Architecture) -> dict[str, object]:
    """Returns the config.json of the layer: one layer of Llama with the target's sizes."""
    scaling = architecture.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        "intermediate_size": architecture.intermediate_size,
        "rms_norm_eps": architecture.rms_norm_eps,
        "rope_theta": architecture.rope_theta,
        "rope_scaling": None if scaling is None else dict(scaling),
        "max_position_embeddings": architecture.max_position_embeddings,
        "torch_dtype": "bfloat16",
    }
