"""A decoder-only transformer over a paged KV cache: Llama, Mistral, Qwen 2 and 3, Qwen3-MoE, SmolLM2.

The T tokens of all sequences of a step are concatenated. There is no prefill phase and no decode phase: a
sequence brings as many tokens as its plan says. A step of decodes only neither reads back to the host nor
allocates there, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import AttentionOptions
from kernels.decode_attention import decode_attention
from kernels.mxfp4_weight import Mxfp4Weight
from kernels.paged_kv import LatentKv, PagedKv
from kernels.prefill_attention import Chunks, prefill_attention
from kernels.rope import Rotation
from kernels.rope_angles import cos_sin_table
from kernels.w8a16 import Int8Weight
from realengine.model.architecture import Architecture
from realengine.model.backend import Backend
from realengine.model.context_cut import gathered, own_part, sampled
from realengine.model.kv_cache import KvCache
from realengine.model.linear import Linear, head_logits, make_linear
from realengine.model.lora import AdapterBank
from realengine.model.moe import Experts, ExpertSlots, Mlp, SharedExperts
from realengine.model.quantization import Weights
from realengine.model.token_exchange import TokenExchange
from realengine.model.variants import GREEDY
from realengine.runner.batch import Batch
from realengine.runner.parallel import ExpertRanks, Group, Stage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """Weights of a block, or a tensor-parallel rank's share of them."""

    attention_norm: torch.Tensor | None
    """None: the attention reads the residual as it is."""
    qkv: Linear
    """Projection to queries, keys and values; with latent attention, the last projection of the queries."""
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    mlp: Mlp | Callable[[torch.Tensor], torch.Tensor]
    attention: AttentionOptions
    cos_sin: torch.Tensor
    """Rotary angles by position."""


class States(NamedTuple):
    """Hidden states of T tokens."""

    hidden_TH: torch.Tensor
    """Output of the final norm, from which the head computes logits."""
    taps: tuple[torch.Tensor, ...]
    """Inputs of the layers that were asked for, [T, H] each, in their order."""


class Decoder:
    """A model's weights, and the forward pass of a step.

    weights: this rank's, from `realengine.weights.load`. group: the tensor-parallel ranks, which all run the
    same batches; by default there is one. adapters: the bank of the adapters that batches refer to. stage:
    its layers are this rank's; by default they are all. expert_ranks: which of the experts the ranks have;
    None: each has a share of all. exchange: with data-parallel ranks.
    context: the ranks that divide the tokens of prompts.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        backend: Backend,
        max_model_len: int,
        group: Group | None = None,
        adapters: AdapterBank | None = None,
        stage: Stage | None = None,
        expert_ranks: ExpertRanks | None = None,
        exchange: TokenExchange | None = None,
        context: Group | None = None,
    ) -> None:
        self.architecture = architecture
        self.stage = stage or Stage.whole(architecture.num_layers)
        self._adapters = adapters
        self._expert_ranks = expert_ranks
        self.exchange = exchange
        self._context = context or Group()
        self.group = group or Group()
        self._backend = backend
        self._num_heads = architecture.num_heads // self.group.world_size
        self._num_kv_heads = architecture.num_kv_heads // self.group.world_size
        self._embedding = dense(weights, "embedding.weight")
        self._head = dense(weights, "head.weight")
        if architecture.normalised_head:
            self._head = F.normalize(self._head)
        self._norm = dense(weights, "norm.weight")
        self.dtype, self.device = self._embedding.dtype, self._embedding.device
        self._gate = backend.silu_mul
        self._interleaved = architecture.interleaved_rope
        self._cos_sin: torch.Tensor = cos_sin_table(
            architecture.rotary_dim,
            max_model_len,
            base=architecture.rope_theta,
            scaling=architecture.rope_scaling,
            device=self.device,
        )
        self._prepare(weights, max_model_len)
        self._layers = {i: self._layer(i, weights) for i in self.stage.layers}

    def _prepare(self, weights: Weights, max_model_len: int) -> None:
        """Prepares what subclasses have besides, before the layers are made."""

    def _options(self, index: int, weights: Weights) -> AttentionOptions:
        """Returns the options of a layer's attention."""
        return AttentionOptions(window=self.architecture.window(index))

    def _table(self, index: int) -> torch.Tensor:
        """Returns the rotary angles of a layer."""
        return self._cos_sin

    def _layer(self, index: int, weights: Weights) -> Layer:
        options, table = self._options(index, weights), self._table(index)
        slots, ranks = None, self._expert_ranks
        if ranks is not None and self.architecture.has_experts(index):
            slots = ExpertSlots(ranks.slots, ranks.rank, self.architecture.num_experts, self.device)
        return _layer(
            index, self.architecture, weights, self._backend, options, table, (slots, self.exchange)
        )

    @property
    def placed_experts(self) -> dict[int, Experts]:
        """The experts of each layer of an expert-parallel rank."""
        found = {}
        for index, layer in self._layers.items():
            experts = layer.mlp.experts if isinstance(layer.mlp, SharedExperts) else layer.mlp
            if isinstance(experts, Experts) and experts.slots is not None:
                found[index] = experts
        return found

    @torch.inference_mode()
    def logits(self, batch: Batch, cache: KvCache) -> torch.Tensor:
        """Computes logits [S, V] of the sampled rows, on every rank; writes the KV of all tokens."""
        states_SH = self.sampled_states(batch, cache)
        assert states_SH is not None, "the last stage computes logits"
        return self.head(states_SH)

    @torch.inference_mode()
    def sampled_states(self, batch: Batch, cache: KvCache) -> torch.Tensor | None:
        """Computes the final hidden states [S, H] of the sampled rows; writes the KV of all tokens.

        A stage before the last one sends what it has computed to the next one, and returns None.
        """
        batch = own_part(batch, self._context)
        hidden, residual, _ = self._blocks(batch, cache, self.stage.layers)
        if not self.stage.is_last:
            self.stage.send(torch.stack([hidden, residual]))
            return None
        rows_S, step = batch.sampled_rows_S, batch.step
        if step is not None and rows_S is not None:
            hidden, residual = (sampled(each, rows_S, step, self._context) for each in (hidden, residual))
        elif rows_S is not None:
            hidden, residual = hidden[rows_S], residual[rows_S]
        return self._final_norm(hidden, residual)

    @torch.inference_mode()
    def states(
        self,
        batch: Batch,
        cache: KvCache,
        *,
        layers: Sequence[int] | None = None,
        taps: Sequence[int] = (),
        inputs_TH: torch.Tensor | None = None,
    ) -> States:
        """Computes the hidden states of all T tokens, on every rank; writes their KV in the layers that run.

        layers: the layers that run, ascending; None: all. taps: layers whose input is returned, too; the
        number of layers stands for the output of the last one before the final norm. inputs_TH: the input of
        the first layer; None: the embeddings of the tokens.
        """
        chosen = self.stage.layers if layers is None else layers
        hidden, residual, found = self._blocks(batch, cache, chosen, taps, inputs_TH)
        return States(self._final_norm(hidden, residual), tuple(found[tap] for tap in taps))

    def head(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Computes the logits [T, V] of final hidden states, on every rank."""
        return self.group.all_gather(head_logits(hidden_TH, self._head))

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of token ids."""
        return F.embedding(tokens_T, self._embedding)

    @property
    def embedding(self) -> torch.Tensor:
        """The embeddings of all tokens [V, H]."""
        return self._embedding

    def _blocks(
        self,
        batch: Batch,
        cache: KvCache,
        layers: Sequence[int],
        taps: Sequence[int] = (),
        inputs_TH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """Runs layers; returns the last MLP's output, the residual to add to it, and the inputs of `taps`."""
        kernels, eps = self._backend, self.architecture.rms_norm_eps
        norm = self._layers[layers[0]].attention_norm
        if inputs_TH is None and not self.stage.is_first:
            size = 2, len(batch.tokens_T), self.architecture.hidden_size
            hidden, residual = self.stage.receive(self._embedding.new_empty(size))
            hidden, residual = kernels.add_rms_norm(hidden, residual, norm, eps)
        else:
            residual = self.embed(batch.tokens_T) if inputs_TH is None else inputs_TH
            hidden = residual if norm is None else kernels.rms_norm(residual, norm, eps)
        found = {}
        for place, i in enumerate(layers):
            if i in taps:  # kernels write into new tensors, so that this one stays as it is
                found[i] = residual
            hidden = self.attend(i, hidden, batch, cache.layers[i])
            following = layers[place + 1] if place + 1 < len(layers) else None
            hidden, residual = self._after_attention(i, following, hidden, residual, batch)
        if len(self._layers) in taps:
            found[len(self._layers)] = hidden + residual
        return hidden, residual, found

    def _after_attention(
        self, index: int, following: int | None, hidden: torch.Tensor, residual: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a layer after its attention, and the norm before the attention of the following one."""
        kernels, eps = self._backend, self.architecture.rms_norm_eps
        hidden, residual = kernels.add_rms_norm(hidden, residual, self._layers[index].mlp_norm, eps)
        hidden = self.mlp(index, hidden, batch)
        if following is not None:
            next_norm = self._layers[following].attention_norm
            hidden, residual = kernels.add_rms_norm(hidden, residual, next_norm, eps)
        return hidden, residual

    def first_piece(self, batch: Batch, cache: KvCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step up to its first attention: that attention's queries, and the residual."""
        residual = self.embed(batch.tokens_T)
        norm, eps = self._layers[0].attention_norm, self.architecture.rms_norm_eps
        hidden = residual if norm is None else self._backend.rms_norm(residual, norm, eps)
        return self._queries(0, hidden, batch, cache.layers[0]), residual

    def next_piece(
        self, index: int, attended: torch.Tensor, residual: torch.Tensor, batch: Batch, cache: KvCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step from the attention of a layer up to the next one: its queries, and the residual.

        After the last layer: the final hidden states of all tokens, and the residual.
        """
        following = index + 1 if index + 1 < len(self._layers) else None
        hidden = self._output(index, attended, batch)
        hidden, residual = self._after_attention(index, following, hidden, residual, batch)
        if following is None:
            return self._final_norm(hidden, residual), residual
        return self._queries(following, hidden, batch, cache.layers[following]), residual

    def attention_of(
        self, index: int, q_THD: torch.Tensor, batch: Batch, cache: KvCache, attended_THD: torch.Tensor
    ) -> None:
        """Computes the attention of a layer between two pieces into attended_THD."""
        self._attention(q_THD, cache.layers[index], batch, self._layers[index].attention, attended_THD)

    def attention_tensors(self, index: int, cache: KvCache) -> tuple[torch.Tensor | None, ...]:
        """Returns the tensors of a layer's attention: its KV, and what its options have."""
        options = self._layers[index].attention
        return (*cache.layers[index], options.sinks_H, options.alibi_slopes_H)

    def attention_kind(self, index: int, cache: KvCache) -> Hashable:
        """Returns a key: layers with the same one launch the same attention on other `attention_tensors`.

        None: the attention of the layer is more than launches of our kernels.
        """
        ours = (decode_attention, prefill_attention)
        if (self._backend.decode_attention, self._backend.prefill_attention) != ours:
            return None
        options, tensors = self._layers[index].attention, self.attention_tensors(index, cache)
        return (
            (options.scale, options.window, options.softcap),
            *(
                None if one is None else (one.dtype, one.shape, one.stride(), one.data_ptr() % 16)
                for one in tensors
            ),
        )

    @property
    def queries_shape(self) -> tuple[int, int] | None:
        """Heads and dimensions of a token's queries; None: a step cannot be computed in pieces."""
        return None if self.architecture.latent is not None else (self._num_heads, self.architecture.head_dim)

    def _final_norm(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor
        normed, _ = self._backend.add_rms_norm(hidden, residual, self._norm, self.architecture.rms_norm_eps)
        return normed

    def _linear(self, at: tuple[int, str], linear: Linear, x_TK: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Applies a linear layer, and adds the outputs of the tokens' adapters."""
        out_TN = linear(x_TK)
        if batch.adapters is not None:
            assert self._adapters is not None
            self._adapters.apply(*at, x_TK, out_TN, batch.adapters)
        return out_TN

    def mlp(self, index: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Computes the MLP or the experts of a layer."""
        mlp = self._layers[index].mlp
        if not isinstance(mlp, Mlp):
            return self.group.all_reduce(mlp(hidden))
        gated = self._gate(self._linear((index, "gate_up"), mlp.gate_up, hidden, batch))
        return self.group.all_reduce(self._linear((index, "down"), mlp.down, gated, batch))

    def attend(self, index: int, hidden: torch.Tensor, batch: Batch, kv: PagedKv | LatentKv) -> torch.Tensor:
        """Computes the attention of a layer, its projections included, and writes the KV of all tokens."""
        q = self._queries(index, hidden, batch, kv)
        attended = torch.empty_like(q, memory_format=torch.contiguous_format)
        self._attention(q, kv, batch, self._layers[index].attention, attended)
        return self._output(index, attended, batch)

    def _queries(
        self, index: int, hidden: torch.Tensor, batch: Batch, kv: PagedKv | LatentKv
    ) -> torch.Tensor:
        """Computes the queries [T, heads, D] of a layer, and writes the KV of all tokens."""
        layer = self._layers[index]
        num_q, num_kv, head_dim = self._num_heads, self._num_kv_heads, self.architecture.head_dim
        qkv = self._linear((index, "qkv"), layer.qkv, hidden, batch)
        heads = qkv.view(-1, num_q + 2 * num_kv, head_dim)
        q, k, v = torch.split(heads, [num_q, num_kv, num_kv], dim=1)
        if layer.q_norm is not None:
            q, k = self._backend.qk_norm(q, k, layer.q_norm, layer.k_norm, self.architecture.rms_norm_eps)
        positions_T, slots_T, step = batch.positions_T, batch.slots_T, batch.step
        if step is not None:
            positions_T, slots_T, own = step.positions_T, step.slots_T, q
            q = q.new_zeros(len(positions_T), num_q, head_dim)  # the queries of other ranks are not read
            q[step.own] = own
            k, v = gathered(torch.cat([k, v], 1), step, self._context).split(num_kv, dim=1)
        rotation = Rotation(positions_T, layer.cos_sin, self._interleaved)
        rotated: torch.Tensor = self._backend.rope_and_write_kv(q, k, v, rotation, kv, slots_T)
        return rotated if step is None else rotated[step.own]

    def _output(self, index: int, attended_THD: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Computes the output projection of a layer's attention."""
        attended = attended_THD.view(len(attended_THD), -1)
        return self.group.all_reduce(self._linear((index, "o"), self._layers[index].o, attended, batch))

    def _attention(
        self,
        q: torch.Tensor,
        kv: PagedKv | LatentKv,
        batch: Batch,
        options: AttentionOptions,
        attended: torch.Tensor,
    ) -> None:
        """Computes decodes with the kernel that splits contexts, other rows with that which tiles queries."""
        num_decodes, num_rows = batch.num_decodes, batch.num_rows
        if num_decodes:
            decodes = batch.contexts(0, num_decodes)
            out = attended[:num_decodes]
            self._backend.decode_attention(q[:num_decodes], kv, decodes, options, out_BHD=out)
        first, start, starts = num_decodes, num_decodes, batch.chunk_starts
        if batch.tree is not None:
            tree, num_seqs, num_tokens = batch.tree
            last, tokens = first + num_seqs, slice(start, start + num_tokens)
            chunks = Chunks(starts[: num_seqs + 1], batch.max_query_len)
            out = attended[tokens]
            self._backend.prefill_attention(
                q[tokens], kv, batch.contexts(first, last), chunks, options, tree=tree, out_THD=out
            )
            first, start, starts = last, tokens.stop, starts[num_seqs:] - num_tokens
        if first < num_rows:
            contexts = batch.contexts(first, num_rows)
            out = attended[start:]
            chunks = Chunks(starts, batch.max_query_len)
            self._backend.prefill_attention(q[start:], kv, contexts, chunks, options, out_THD=out)


def _layer(
    index: int,
    architecture: Architecture,
    weights: Weights,
    backend: Backend,
    options: AttentionOptions,
    cos_sin: torch.Tensor,
    placed: tuple[ExpertSlots | None, TokenExchange | None],
) -> Layer:
    name = f"layers.{index}."

    def linear(of: str) -> Linear:
        return linear_of(name + of, weights, backend)

    def norm(of: str) -> torch.Tensor:
        return dense(weights, f"{name}{of}.weight")

    return Layer(
        attention_norm=norm("attention_norm") if f"{name}attention_norm.weight" in weights else None,
        qkv=linear("qkv" if architecture.latent is None else "q"),
        q_norm=norm("q_norm") if architecture.qk_norm else None,
        k_norm=norm("k_norm") if architecture.qk_norm else None,
        o=linear("o"),
        mlp_norm=norm("mlp_norm"),
        mlp=_experts(name, architecture, weights, backend, placed)
        if architecture.has_experts(index)
        else Mlp(gate_up=linear("gate_up"), down=linear("down")),
        attention=options,
        cos_sin=cos_sin,
    )


def linear_of(name: str, weights: Weights, backend: Backend) -> Linear:
    """Returns the linear layer of a name, with its bias if it has one."""
    bias = dense(weights, f"{name}.bias") if f"{name}.bias" in weights else None
    return make_linear(weights[f"{name}.weight"], bias, backend)


def _experts(
    name: str,
    architecture: Architecture,
    weights: Weights,
    backend: Backend,
    placed: tuple[ExpertSlots | None, TokenExchange | None],
) -> Experts | SharedExperts:
    gate_up, down = weights[name + "experts_gate_up.weight"], weights[name + "experts_down.weight"]
    assert isinstance(gate_up, torch.Tensor | Int8Weight | Mxfp4Weight)
    assert isinstance(down, torch.Tensor | Int8Weight | Mxfp4Weight)
    experts = Experts(
        dense(weights, name + "router.weight"),
        gate_up,
        down,
        architecture.num_experts_per_tok,
        architecture.norm_topk_prob,
        backend,
        *placed,
    )
    if architecture.routing is GREEDY and not architecture.shared_intermediate_size:
        return experts
    shared = None
    if architecture.shared_intermediate_size:
        gate_up_of, down_of = (
            linear_of(f"{name}shared_{of}", weights, backend) for of in ("gate_up", "down")
        )
        shared = Mlp(gate_up=gate_up_of, down=down_of)
    correction = dense(weights, f"{name}correction.bias") if architecture.routing.has_correction else None
    return SharedExperts(experts, architecture.routing, correction, shared)


def dense(weights: Weights, name: str) -> torch.Tensor:
    """Returns a weight that is not quantised."""
    weight = weights[name]
    assert isinstance(weight, torch.Tensor), name
    return weight
