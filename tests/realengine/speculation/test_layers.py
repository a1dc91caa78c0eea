"""Heads and layers draft what a plain model drafts from the whole text, after any acceptance."""

import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kernels.rope_angles import rope_frequencies
from policies.speculation.proposers.eagle import Eagle
from policies.speculation.proposers.eagle3 import Eagle3
from policies.speculation.proposers.medusa import Medusa
from policies.speculation.proposers.mtp import Mtp
from policies.speculation.tree import TokenTree
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.kv_cache import KvCache
from realengine.runner.parallel import Group
from realengine.serving.llm import LLM
from realengine.serving.model import Model
from realengine.speculation.checkpoints.configs import Eagle3Options
from realengine.speculation.checkpoints.heads import load_heads
from realengine.speculation.checkpoints.layers import load_eagle, load_eagle3, load_mtp
from realengine.speculation.context import DrafterContext
from realengine.speculation.drafters import eagle, eagle3, medusa, mtp
from realengine.speculation.settings import SpeculationSettings
from realengine.weights.load import load_weights
from realengine.weights.table import expected
from tests.realengine.model.test_decoder import CPU, cache_of, make
from tests.realengine.small_models import CONFIGS
from tests.realengine.small_models import make as make_llm
from tests.realengine.speculation.passes import Row, Sequences
from tests.realengine.speculation.test_draft_model import PROMPTS, decode_row, prompt_rows
from tests.realengine.speculation.test_lossless import GREEDY, prompts, tokens_of

torch.set_num_threads(1)

MAX_LEN = 64
TREE = TokenTree.of_paths([[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 0, 0], [2, 0, 0], [2, 0, 1]])


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


PROPOSERS = {
    "medusa": (medusa, Medusa(draft=None, num_speculative_tokens=4)),
    "medusa tree": (medusa, Medusa(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle": (eagle, Eagle(draft=None, num_speculative_tokens=4)),
    "eagle tree": (eagle, Eagle(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle3": (eagle3, Eagle3(draft=None, num_speculative_tokens=4)),
    "eagle3 tree": (eagle3, Eagle3(draft=None, num_speculative_tokens=TREE.num_nodes, tree=TREE)),
    "eagle3 normed": (eagle3, Eagle3(draft=None, num_speculative_tokens=4)),
    "mtp": (mtp, Mtp(draft=None, num_speculative_tokens=4)),
}


def settings_of(proposer, source):
    return SpeculationSettings(proposer=proposer, models=(source,))


def scaled(tensors, factor=12.0):
    """Makes the drawn weights larger, so that drafts depend on all of them."""
    for name, tensor in tensors.items():
        if "norm" not in name and not name.startswith("embedding"):
            tensor.mul_(factor)


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


def expected_drafts(plain, known, tree, num_levels):
    if tree is None:
        found = []
        for _ in range(num_levels):
            found += plain.ranked(known, found, 1)
        return found
    paths = []
    for node in range(tree.num_nodes_to(num_levels)):
        before = paths[tree.parents[node]] if tree.parents[node] >= 0 else []
        paths.append([*before, plain.ranked(known, before, tree.ranks[node] + 1)[tree.ranks[node]]])
    return [path[-1] for path in paths]


def built(kind, monkeypatch):
    """Returns the drafter of a kind with random weights that were made larger, and its plain model."""
    module, proposer = PROPOSERS[kind]
    context, cache = context_of()
    loader = {"medusa": "load_heads", "eagle": "load_eagle", "eagle3": "load_eagle3", "mtp": "load_mtp"}
    name = loader[proposer.method]
    original, kept = getattr(module, name), []

    def load(*args):
        weights = original(*args)
        if proposer.method == "medusa":
            for blocks, projection in weights:
                scaled({"projection": projection} | {str(i): w for i, (w, _) in enumerate(blocks)})
        else:
            scaled(weights.tensors)
        if kind == "eagle3 normed":
            weights = weights._replace(options=Eagle3Options((0, 1, 2), norm_before_residual=True))
        kept.append(weights)
        return weights

    monkeypatch.setattr(module, name, load)
    source = context.architecture
    if proposer.method == "eagle3":
        source = replace(source, vocab_size=48)
    drafter = module.load(settings_of(proposer, source), context).build(cache)
    weights = kept[0]
    plain = (
        PlainHeads(context, weights)
        if proposer.method == "medusa"
        else Plain(proposer.method, context, weights)
    )
    return context, cache, drafter, proposer.tree, plain


@pytest.mark.parametrize("kind", PROPOSERS)
def test_drafts_equal_those_of_a_plain_model_after_any_acceptance(kind, monkeypatch):
    context, cache, drafter, tree, plain = built(kind, monkeypatch)
    seqs, draw = Sequences(70, 4, MAX_LEN, len(PROMPTS)), random.Random(5)
    rows = prompt_rows(seqs, draw)
    for num_levels in (3, 1, 0, 2, 3):
        drafting = [seq for seq in range(len(PROMPTS)) if num_levels and draw.random() < 0.8]
        passed = seqs.passed(rows, drafts_next=bool(drafting))
        states = context.target.states(passed.batch, cache, taps=drafter.taps)
        passed = replace(passed, states=states)
        drafter.follow(passed)
        drafted = {}
        if drafting:
            tokens = drafter.draft(passed, seqs.start(drafting, num_padding=1), num_levels).tokens_NK
            drafted = dict(zip(drafting, tokens.tolist(), strict=False))
        for seq, tokens in drafted.items():
            assert tokens == expected_drafts(plain, seqs.known[seq], tree, num_levels)
        rows = []
        for seq in range(len(PROMPTS)):
            drafts = drafted.get(seq, [])[:num_levels]
            rows.append(decode_row(seqs, draw, seq, drafts, draw.randint(0, len(drafts))))


@pytest.mark.parametrize("kind", PROPOSERS)
def test_no_token_changes(kind):
    _, proposer = PROPOSERS[kind]
    source = Architecture.from_hf(CONFIGS["llama"])
    llm = make_llm(speculative_config=settings_of(proposer, source))
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(make_llm().generate(prompts(), GREEDY))
    assert all(output.drafts.num_draft_tokens > 0 for output in outputs)
    llm.engine.core.check_integrity()


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_no_token_changes_where_steps_overlap(kind):
    _, proposer = PROPOSERS[kind]
    source = Architecture.from_hf(CONFIGS["llama"])
    llm = make_llm(speculative_config=settings_of(proposer, source), overlap=True)
    assert tokens_of(llm.generate(prompts(), GREEDY)) == tokens_of(make_llm().generate(prompts(), GREEDY))


def drawn(*shape):
    return torch.randn(*shape)


def hf_layer(prefix, spec, *, width=None, input_norm=True):
    """Returns random tensors of a layer with Hugging Face's names."""
    hidden, dim = spec.hidden_size, spec.head_dim
    width = width or hidden
    tensors = {
        "self_attn.q_proj.weight": drawn(spec.num_heads * dim, width),
        "self_attn.k_proj.weight": drawn(spec.num_kv_heads * dim, width),
        "self_attn.v_proj.weight": drawn(spec.num_kv_heads * dim, width),
        "self_attn.o_proj.weight": drawn(hidden, spec.num_heads * dim),
        "post_attention_layernorm.weight": drawn(hidden),
        "mlp.gate_proj.weight": drawn(spec.intermediate_size, hidden),
        "mlp.up_proj.weight": drawn(spec.intermediate_size, hidden),
        "mlp.down_proj.weight": drawn(hidden, spec.intermediate_size),
    }
    if input_norm:
        tensors["input_layernorm.weight"] = drawn(hidden)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def test_eagle_layers_are_read_by_their_published_names(tmp_path):
    context, _ = context_of()
    spec = context.architecture
    tensors = hf_layer("layers.0.", spec, input_norm=False) | {
        "fc.weight": drawn(spec.hidden_size, 2 * spec.hidden_size),
        "fc.bias": drawn(spec.hidden_size),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_eagle(tmp_path, context).tensors
    assert torch.equal(found["fc.bias"], tensors["fc.bias"])
    q = tensors["layers.0.self_attn.q_proj.weight"]
    assert torch.equal(found["layers.0.qkv.weight"][: len(q)], q)
    assert "layers.0.attention_norm.weight" not in found


def test_eagle3_layers_are_read_by_their_published_names(tmp_path):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    tensors = hf_layer("midlayer.", spec, width=2 * hidden) | {
        "midlayer.hidden_norm.weight": drawn(hidden),
        "fc.weight": drawn(hidden, 3 * hidden),
        "norm.weight": drawn(hidden),
        "lm_head.weight": drawn(40, hidden),
        "d2t": torch.arange(40),
        "t2d": torch.zeros(spec.vocab_size, dtype=torch.bool),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_eagle3(tmp_path, context)
    assert found.tensors["layers.0.qkv.weight"].shape[1] == 2 * hidden
    assert torch.equal(found.tensors["head.weight"], tensors["lm_head.weight"])
    assert found.token_offsets.tolist() == list(range(40))
    save_file(tensors | {"d2t": torch.full((40,), 90)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t names token 129, must be >= 0 and < 97"):
        load_eagle3(tmp_path, context)
    save_file({name: t for name, t in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="d2t is missing: its vocabulary has 40 tokens, and the target's 97"):
        load_eagle3(tmp_path, context)


def test_eagle3_layers_of_speculators_are_read_with_their_options(tmp_path):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    tensors = hf_layer("layers.0.", spec, width=2 * hidden) | {
        "layers.0.hidden_norm.weight": drawn(hidden),
        "fc.weight": drawn(hidden, 2 * hidden),
        "norm.weight": drawn(hidden),
        "lm_head.weight": drawn(spec.vocab_size, hidden),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    inside = {key: value for key, value in CONFIGS["llama"].items() if key != "architectures"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "transformer_layer_config": inside | {"num_hidden_layers": 1},
    }

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))

    write()
    found = load_eagle3(tmp_path, context)
    assert found.options == Eagle3Options((1, 2), norm_before_residual=True)
    assert torch.equal(found.tensors["fc.weight"], tensors["fc.weight"])
    write(norm_before_residual=False)
    assert not load_eagle3(tmp_path, context).options.norm_before_residual
    write(eagle_aux_hidden_state_layer_ids=[1, 9])
    with pytest.raises(ValueError, match=r"layer_ids=\[1, 9\]: must be a list of layers from 0 to 2"):
        load_eagle3(tmp_path, context)
    write(norm_before_fc=True)
    with pytest.raises(ValueError, match=r"config.json: norm_before_fc=true is not supported"):
        load_eagle3(tmp_path, context)


@pytest.mark.parametrize("layout", ["mtp", "deepseek"])
def test_modules_beside_the_target_s_weights_draft_by_default(tmp_path, layout):
    spec = Architecture.from_hf(CONFIGS["llama"])
    target = load_weights(None, spec, torch.float32, "cpu", seed=1)
    stored = {}
    for weight in expected(spec):
        for part in weight.parts:
            stored[part.name] = target[weight.name][part.into].contiguous()
    prefix = "mtp.layers.0." if layout == "mtp" else f"model.layers.{spec.num_layers}."
    norms = {
        "mtp": ("mtp.pre_fc_norm_embedding.", "mtp.pre_fc_norm_hidden.", "mtp.fc.", "mtp.norm."),
        "deepseek": tuple(prefix + name for name in ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")),
    }[layout]
    hidden = spec.hidden_size
    module = hf_layer(prefix, spec) | {
        f"{name}weight": drawn(hidden, 2 * hidden) if number == 2 else drawn(hidden)
        for number, name in enumerate(norms)
    }
    save_file(stored | module, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    model = Model(Architecture.from_path(tmp_path), tmp_path, None)
    settings = {"device": "cpu", "num_kv_blocks": 200, "max_num_seqs": 8}
    llm = LLM(model, **settings, speculative_config={"method": "mtp"})
    outputs = llm.generate(prompts(), GREEDY)
    assert tokens_of(outputs) == tokens_of(make_llm().generate(prompts(), GREEDY))
    assert all(output.drafts.num_draft_tokens > 0 for output in outputs)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no modules for multi-token prediction, neither mtp"):
        LLM(model, **settings, speculative_config={"method": "mtp"})


@pytest.mark.parametrize("layout", ["mtp", "deepseek"])
def test_modules_are_read_by_their_published_names(tmp_path, layout):
    context, _ = context_of()
    spec, hidden = context.architecture, context.architecture.hidden_size
    n = spec.num_layers
    names = {
        "mtp": (
            "mtp.layers.0.",
            "mtp.pre_fc_norm_embedding.",
            "mtp.pre_fc_norm_hidden.",
            "mtp.fc.",
            "mtp.norm.",
        ),
        "deepseek": tuple(
            f"model.layers.{n}.{each}" for each in ("", "enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
        ),
    }
    prefix, enorm, hnorm, proj, norm = names[layout]
    tensors = hf_layer(prefix, spec) | {
        f"{enorm}weight": drawn(hidden),
        f"{hnorm}weight": drawn(hidden),
        f"{proj}weight": drawn(hidden, 2 * hidden),
        f"{norm}weight": drawn(hidden),
        "model.layers.0.of.the.target": drawn(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = load_mtp(tmp_path, context, 1).tensors
    assert torch.equal(found["0.proj.weight"], tensors[f"{proj}weight"])
    assert torch.equal(found["layers.0.down.weight"], tensors[f"{prefix}mlp.down_proj.weight"])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("before", ["", "medusa_heads."])
def test_heads_in_vllm_s_layout_may_have_biases_and_a_prefix(tmp_path, before, has_bias):
    context, _ = context_of()
    hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
    tensors = {}
    for i in range(2):
        tensors[f"{before}blocks.{i}.layers.0.weight"] = drawn(hidden, hidden)
        tensors[f"{before}lm_heads.{i}.weight"] = drawn(vocab, hidden)
        if has_bias:
            tensors[f"{before}blocks.{i}.layers.0.bias"] = drawn(hidden)
    save_file(tensors, tmp_path / "model.safetensors")
    (((weight, bias),), _), _ = load_heads(tmp_path, context, 2)
    assert torch.equal(weight, tensors[f"{before}blocks.0.layers.0.weight"])
    assert (bias is not None) == has_bias


@pytest.mark.parametrize("layout", ["published", "vllm"])
def test_heads_are_read_by_their_published_names(tmp_path, layout):
    context, _ = context_of()
    hidden, vocab = context.architecture.hidden_size, context.architecture.vocab_size
    tensors = {}
    for i in range(3):
        if layout == "published":
            tensors[f"{i}.0.linear.weight"] = drawn(hidden, hidden)
            tensors[f"{i}.0.linear.bias"] = drawn(hidden)
            tensors[f"{i}.1.weight"] = drawn(vocab, hidden)
        else:
            tensors[f"blocks.{i}.layers.0.weight"] = drawn(hidden, hidden)
            tensors[f"lm_heads.{i}.weight"] = drawn(vocab, hidden)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    heads = load_heads(tmp_path, context, 2)
    assert len(heads) == 3
    ((_, bias),), projection = heads[1]
    assert (bias is None) == (layout == "vllm")
    assert torch.equal(projection, tensors["1.1.weight" if layout == "published" else "lm_heads.1.weight"])
    with pytest.raises(ValueError, match="has 3 heads, and a draft has 4 places; set num_speculative_tokens"):
        load_heads(tmp_path, context, 4)
    save_file(tensors | {next(iter(tensors)): drawn(3, hidden)}, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=rf"is \[3, {hidden}\], must be \[{hidden}, {hidden}\]"):
        load_heads(tmp_path, context, 2)


def test_layers_that_do_not_fit_are_refused(tmp_path):
    context, _ = context_of()
    spec = context.architecture
    with pytest.raises(ValueError, match="hidden_size=32: must be 48, the target's"):
        load_eagle(replace(spec, hidden_size=32), context)
    tensors = hf_layer("layers.0.", spec, input_norm=False)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: fc\.weight"):
        load_eagle(tmp_path, context)
    save_file(
        tensors | {"fc.weight": drawn(spec.hidden_size, 2 * spec.hidden_size), "more": drawn(2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ValueError, match="unknown to this architecture, so outputs would be wrong: more"):
        load_eagle(tmp_path, context)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="contains no safetensors file"):
        load_heads(tmp_path, context, 2)


def test_the_layer_s_kv_has_the_target_s_blocks():
    context, cache = context_of()
    _, proposer = PROPOSERS["eagle"]
    loaded = eagle.load(settings_of(proposer, context.architecture), context)
    drafter = loaded.build(cache)
    (sets,) = drafter.cache_sets
    assert len(sets.tensors[0]) == len(cache.layers[0].keys)
    assert loaded.block_bytes == KvCache.bytes_per_block(
        replace(context.architecture, num_layers=1), 4, torch.float32
    )


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle3"])
def test_trees_that_cannot_be_drafted_are_refused(method):
    config = {"method": method, "model": Architecture.from_hf(CONFIGS["llama"])}
    wide = config | {"speculative_token_tree": [(rank,) for rank in range(98)]}
    with pytest.raises(ValueError, match=r"speculative_token_tree: a node has 98 children: .* vocab_size=97"):
        make_llm(speculative_config=wide)
    deep = config | {"speculative_token_tree": [(0,), (1,), (0, 0), (0, 1)]}
    if method == "medusa":  # its nodes have no KV of their own
        outputs = make_llm(max_model_len=4, speculative_config=deep).generate([[1]], GREEDY)
        assert tokens_of(outputs) == tokens_of(make_llm(max_model_len=4).generate([[1]], GREEDY))
        return
    with pytest.raises(ValueError, match=r"speculative_token_tree: 4 nodes need KV .* it holds 4"):
        make_llm(max_model_len=4, speculative_config=deep)
