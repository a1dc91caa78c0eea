"""A small model, its kinds of layers, and the operators of one of its iterations."""

from hwmodels.assembly import iteration_operators
from hwmodels.assembly.site import Kernels
from hwmodels.iterations import COMPONENTS
from hwmodels.model import (
    Block,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    MixtureOfExperts,
    ModelSpec,
)
from hwmodels.operators.moe_routing import Routing

BALANCED = Kernels(routing=Routing(kind="balanced"))


def grouped(**given):
    return GroupedQueryAttention(**{"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, **given})


def latent(**given):
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    return LatentAttention(**{"num_heads": 8, "q_lora_rank": 48, **sizes, **given})


def experts(**given):
    return MixtureOfExperts(**{"num_experts": 8, "top_k": 2, "intermediate_size": 40, **given})


def make_model(attention=None, mlp=None, count=4, **given):
    """Returns a model of 4 layers, width 64, 8 query heads of 16 over 4 KV heads and an MLP of 160."""
    block = Block(count=count, attention=attention or grouped(), mlp=mlp or DenseMlp(intermediate_size=160))
    shape = {"name": "tiny", "hidden_size": 64, "vocab_size": 1000, "max_position_embeddings": 4096}
    return ModelSpec(**{**shape, "blocks": (block,), **given})


class Listed:
    """An iteration's operators, and the batch of one device."""

    def __init__(self, site, shape, **given):
        self.operators = iteration_operators(site, **given)
        self.batch = site.layout.rank_batch(shape)

    def of(self, name):
        return [op for op in self.operators if op.name == name]

    def calls(self, name):
        return sum(op.calls for op in self.of(name))

    def once(self, name, quantity):
        """Returns the quantity of one call; all calls of that name must agree."""
        (amount,) = {float(getattr(op, quantity)(self.batch)) for op in self.of(name)}
        return amount

    def total(self, quantity, *names, components=COMPONENTS):
        """Sums a quantity over all calls of the named operators, or of all operators if none is named."""
        return sum(
            float(op.calls * getattr(op, quantity)(self.batch))
            for op in self.operators
            if (op.name in names or not names) and op.component in components
        )
