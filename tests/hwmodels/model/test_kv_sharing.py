"""A cache shared by heads, windows and layers: counts and bytes by hand, and the published factors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.model import Block, DenseMlp, ModelSpec
from hwmodels.model.attention import GroupedQueryAttention
from hwmodels.model.transforms import SharedKv

CONTEXT = 10_240


def make_model(num_layers=30, num_heads=32, num_kv_heads=8, window=None):
    attention = GroupedQueryAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128, window=window
    )
    return ModelSpec(
        name="made-up",
        hidden_size=4096,
        vocab_size=1000,
        max_position_embeddings=131_072,
        blocks=(Block(count=num_layers, attention=attention, mlp=DenseMlp(intermediate_size=14336)),),
    )


def saved(model, **settings):
    """Returns how many times smaller the KV of a sequence of 10,240 tokens becomes."""
    given_up = {"num_kv_heads": None, "window": None, "layers_per_kv": 1} | settings
    smaller = SharedKv(**given_up).applied(model)
    assert smaller.num_layers == model.num_layers
    return model.kv_bytes_of_sequence(CONTEXT) / smaller.kv_bytes_of_sequence(CONTEXT)


def test_the_published_factors():
    """Multi-query attention 8 times; a window of 1,024 keeps a tenth of its layers' KV; sharing 3 times."""
    model = make_model()
    assert saved(model, num_kv_heads=1) == 8
    assert saved(model, layers_per_kv=3) == 3
    assert saved(model, window=1024, full_every=1) == 1
    one_of_six_is_full = 1 / (1 / 6 + 5 / 6 / 10)
    assert saved(model, window=1024, full_every=6) == pytest.approx(one_of_six_is_full) == 4.0
    windowed = make_model(window=1024)
    assert model.kv_bytes_of_sequence(CONTEXT) / windowed.kv_bytes_of_sequence(CONTEXT) == 10


def test_together_they_save_more_than_twenty_times():
    """2 full and 9 windowed caches of one head: 8 x 30 x 10 / (2 x 10 + 9) = 82.8 times."""
    together = saved(make_model(), num_kv_heads=1, window=1024, layers_per_kv=3)
    assert together == pytest.approx(8 * 30 * 10 / 29)
    assert together > 20


def test_layers_keep_their_number_and_kind():
    blocks = SharedKv(window=1024, full_every=6, layers_per_kv=3).applied(make_model(32)).blocks
    kinds = [(b.count, b.attention.window, b.attention.shares_kv, b.attention.num_kv_heads) for b in blocks]
    assert kinds == [(2, None, False, 1), (4, None, True, 1), (9, 1024, False, 1), (17, 1024, True, 1)]


def test_a_shorter_window_of_the_model_stays():
    blocks = SharedKv(window=1024).applied(make_model(6, window=256)).blocks
    assert {block.attention.window for block in blocks} == {256}


@given(
    num_layers=st.integers(1, 100),
    full_every=st.integers(1, 10),
    layers_per_kv=st.integers(1, 10),
    window=st.none() | st.integers(1, 5000),
)
def test_a_cache_never_grows(num_layers, full_every, layers_per_kv, window):
    settings = {"full_every": full_every, "layers_per_kv": layers_per_kv, "window": window}
    assert saved(make_model(num_layers), **settings) >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads=0: must be >= 1, or null"),
        ({"window": 0}, "window=0: must be >= 1, or null"),
        ({"full_every": 0}, "full_every=0: must be >= 1"),
        ({"layers_per_kv": 1.5}, "layers_per_kv=1.5: must be a whole number >= 1"),
    ],
)
def test_rejects_impossible_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SharedKv(**settings)


def test_rejects_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="num_kv_heads=5: must divide num_heads=32"):
        SharedKv(num_kv_heads=5).applied(make_model())
