"""Transfers between other layouts: copies by hand, bytes conserved, and their times in a simulation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from sim.engine.replica_pool import KvLayout
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.transfer.kv_transfers import _head_copies, resharding

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
SIZES = st.sampled_from([1, 2, 4, 8, 16])


@pytest.mark.parametrize(
    ("heads", "sizes", "senders", "copies", "equal_senders"),
    [
        (8, (4, 4), 4, 4, 4),
        (8, (2, 4), 2, 4, 2),  # each rank splits its four heads for two ranks
        (8, (4, 2), 4, 4, 4),  # two ranks join their heads
        (8, (8, 1), 8, 8, 8),
        (2, (4, 2), 2, 2, 2),  # the second copies of both heads stay where they are
        (2, (4, 4), 4, 4, 4),
        (2, (2, 8), 2, 8, 2),  # each rank sends its head four times
        (2, (8, 4), 4, 4, 4),
        (1, (8, 2), 2, 2, 2),  # a latent vector
    ],
)
def test_heads_are_split_joined_and_copied(heads, sizes, senders, copies, equal_senders):
    found = resharding(KvLayout(heads, 10, sizes[0]), KvLayout(heads, 10, sizes[1]))
    assert found == (senders, copies, 2 * 10 * copies, equal_senders)


def test_stages_of_a_partition_send_the_layers_that_they_have():
    """7 and 3 layers to 5 and 5: layers 0 to 4, 5 and 6, 7 to 9."""
    uneven = KvLayout(8, 10, 1, 2, (7, 3))
    assert [uneven.layers(stage) for stage in (0, 1)] == [range(7), range(7, 10)]
    assert resharding(uneven, KvLayout(8, 10, 1, 2)).num_copies == 3


def test_pipeline_stages_send_the_layers_that_the_others_have():
    """10 layers: stages of 5 and 5 to stages of 4, 3 and 3: layers 4 to 6 are in the second one."""
    found = resharding(KvLayout(8, 10, 1, 2), KvLayout(8, 10, 1, 3))
    assert (found.num_senders, found.num_copies, found.slices_per_block) == (2, 4, 20)
    assert found.num_equal_senders == 2


def test_stages_of_unequal_size_are_limited_by_the_largest():
    found = resharding(KvLayout(8, 10, 1, 3), KvLayout(8, 10))
    assert found.num_equal_senders == pytest.approx(10 / 4)


@given(heads=SIZES, source=SIZES, target=SIZES)
def test_every_rank_gets_its_heads_from_ranks_that_have_them(heads, source, target):
    layouts = KvLayout(heads, 3, source), KvLayout(heads, 3, target)
    copies = _head_copies(*layouts)
    for rank in range(target):
        assert sum(n for (_, to), n in copies.items() if to == rank) == len(layouts[1].heads(rank))
    for sender, rank in copies:
        assert set(layouts[0].heads(sender)) & set(layouts[1].heads(rank))
    if source == target:
        assert all(sender == rank for sender, rank in copies)


def run(*overrides):
    scenario, source = build_run(
        SOURCE.compose(
            [
                *("model=llama3_1_8b", "pools=disaggregated", "workload=poisson", "workload.num_requests=1"),
                *(
                    "network=infiniband",
                    "kv_transfer.transfer=at_end",
                    "workload.lengths.prompt_tokens.value=2048",
                ),
                *overrides,
            ]
        )
    )
    return scenario.run(source).in_pandas()


def seconds(*overrides):
    return run(*overrides).records.requests["kv_transfer_s"].iloc[0]


def test_replicated_heads_are_sent_by_the_ranks_that_need_to():
    """Qwen3-30B-A3B has 4 KV heads: of 8 GPUs only 4 send to 4, at the speed of 4 to 4."""
    four, eight = (
        seconds(
            "model=qwen3_30b_a3b",
            f"+pools.prefill.tensor_parallel_size={size}",
            "+pools.decode.tensor_parallel_size=4",
        )
        for size in (4, 8)
    )
    assert eight == pytest.approx(four)


def test_messages_take_their_time_and_the_summary_says_how_many():
    """128 blocks x 32 layers x 2 x 4 copies, each as long as 4,096 bytes, over 2 links."""
    sizes = ("+pools.prefill.tensor_parallel_size=2", "+pools.decode.tensor_parallel_size=4")
    result = run(*sizes)
    assert (
        "KV from pool prefill to pool decode: 2 of 2 GPUs send 4 parts to 4 GPUs, a block in 256 messages."
        in result.summary["notes"]
    )
    link = result.records.links[0].bytes_per_s
    added_s = seconds(*sizes, "kv_transfer.message_bytes=4096") - seconds(*sizes)
    assert added_s == pytest.approx(128 * 256 * 4096 / link, rel=1e-6)


def test_negative_message_bytes_are_refused():
    with pytest.raises(ConfigError, match=r"kv_transfer\.message_bytes=-1.*: must be a finite number >= 0"):
        run("kv_transfer.message_bytes=-1")
