"""A new kind of attention, added as a built-in one would be: shape, operators, reader of config.json."""

from dataclasses import dataclass, replace

import pytest

from hwmodels.assembly.attention import OPERATORS
from hwmodels.assembly.roofline import Roofline
from hwmodels.hf.architectures import ARCHITECTURES, Architecture
from hwmodels.hf.config import from_hf_fields
from hwmodels.iterations.ops import decode_shape
from hwmodels.model.attention import Attention
from hwmodels.model.weights import KV_BYTES, Matrix, share_of
from sim import simulate

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "mean_width": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanAttention(Attention):
    """Each head keeps the running mean of its values: a state of one vector, and a cached byte a token."""

    num_heads: int
    width: int

    num_kv_heads = 1

    @property
    def num_query_heads(self):
        return self.num_heads

    @property
    def cutting_rule(self):
        return f"divide the {self.num_heads} heads of means"

    def matrices(self, hidden_size, tensor_parallel_size=1):
        width = share_of(self.num_heads, tensor_parallel_size) * self.width
        return Matrix("v_proj", hidden_size, width), Matrix("o_proj", width, hidden_size)

    def vector_elements(self, hidden_size):
        return 0

    def kv_bytes_per_token(self, kv_dtype, tensor_parallel_size=1):
        return 1.0

    def state_bytes(self, dtype, tensor_parallel_size=1):
        return share_of(self.num_heads, tensor_parallel_size) * self.width * KV_BYTES[dtype]

    def with_fewer_heads(self, share):
        return replace(self, num_heads=max(1, round(share * self.num_heads)))


def mean_operators(site, spec, calls):
    v_proj, o_proj = spec.matrices(site.model.hidden_size, site.tp)
    yield from site.gemm(v_proj, calls)
    yield site.stream("running_mean", calls, 2 * o_proj.k * site.model.element_bytes)
    yield from site.gemm(o_proj, calls)


def mean_attention(fields):
    layer = MeanAttention(num_heads=fields.whole("num_attention_heads"), width=fields.whole("mean_width"))
    return [layer] * fields.whole("num_hidden_layers")


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(OPERATORS, MeanAttention, mean_operators)
    monkeypatch.setitem(ARCHITECTURES, "ToyForCausalLM", Architecture(attention=mean_attention))


def test_three_places_are_enough_to_read_and_weigh_it():
    model = from_hf_fields(CONFIG, "toy")
    mlp, tables = 3 * 256 * 512, 2 * 1000 * 256
    assert model.num_parameters == 4 * (2 * 256 * 512 + mlp + 2 * 256) + 256 + tables
    assert model.kv_bytes_per_token() == 4
    assert model.state_bytes_per_sequence() == 4 * 512 * 2


def test_three_places_are_enough_to_serve_it_on_many_devices():
    run = simulate(
        model=from_hf_fields(CONFIG, "toy"),
        tensor_parallel_size=2,
        workload="poisson",
        workload__num_requests=20,
        workload__lengths__output_tokens__value=8,
    )
    assert run.summary["requests"]["finished"] == 20


def test_three_places_are_enough_to_price_it(devices):
    roofline = Roofline(model=from_hf_fields(CONFIG, "toy"), device=devices["h100_sxm"])
    priced = {line.operator for line in roofline.explain(decode_shape(1, 100))}
    assert {"v_proj", "running_mean", "o_proj"} <= priced


def test_layouts_that_do_not_cut_it_are_refused_in_its_words():
    model = from_hf_fields(CONFIG, "toy")
    with pytest.raises(ValueError, match="must divide the 8 heads of means of toy; nearest: 2"):
        model.check_tensor_parallel_size(3)
