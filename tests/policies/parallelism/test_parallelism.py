"""Layout policies: the candidates, the choice and its explanation."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.parallelism import AsSet, Facts, Figures, Load, Sizes
from policies.parallelism.auto import MIN_RING_TOKENS, Auto, Objective


def facts(**changes):
    given = {
        "model": "toy",
        "gpu": "chip",
        "num_heads": 32,
        "num_kv_heads": 8,
        "num_layers": 32,
        "weight_bytes": 16e9,
        "gpu_memory_bytes": 80e9,
        "gpus_per_node": 8,
    }
    return Facts(**{**given, **changes})


def figures(prefill_s=0.1, decode_s=lambda n: 0.01, max_num_seqs=64, usd_per_hour=1.0, prompt_s=None):
    return Figures(
        max_num_seqs=max_num_seqs,
        prefill_s=prefill_s,
        prompt_s=prefill_s if prompt_s is None else prompt_s,
        decode_s=decode_s,
        bounds=lambda n: {"memory": 0.7, "communication": 0.3},
        usd_per_hour=usd_per_hour,
    )


class Asked:
    """An estimate that logs what it was asked for; prices by sizes, refuses all other layouts."""

    def __init__(self, price=lambda sizes: figures()):
        self.price, self.sizes = price, []

    def __call__(self, sizes, load):
        self.sizes.append(sizes)
        found = self.price(sizes)
        if found is None:
            raise ValueError(f"{sizes}: does not fit")
        return found


def by_devices(sizes):
    """Returns figures by which each GPU takes its share of the time; a pipeline speeds up prompts alone."""
    tensor = sizes.tensor_parallel_size
    return figures(
        prefill_s=0.8 / sizes.num_devices, decode_s=lambda n: 0.08 / tensor, usd_per_hour=sizes.num_devices
    )


def test_as_set_keeps_what_is_given():
    sizes = Sizes(2, 4, sequence_parallel=True)
    assert AsSet().choose(facts(given=sizes), Asked()).sizes == sizes


def test_sizes_are_described_in_words():
    assert str(Sizes()) == "one GPU"
    assert str(Sizes(4, 2)) == "tensor 4 x pipeline 2"
    assert str(Sizes(1, 1, 1, 8, 8)) == "attention data 8, expert 8"
    assert str(Sizes(4, sequence_parallel=True)) == "tensor 4, sequence parallel"
    assert Sizes(2, 3, 1, 4, 8).num_devices == 24


# Candidates


@given(
    st.integers(1, 24), st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans(), st.integers(1, 20_000)
)
def test_candidates_are_sane(devices, node, has_experts, shares_kv, prompt):
    asked = Asked()
    policy = Auto(devices=devices, prompt_tokens=prompt)
    policy.choose(facts(gpus_per_node=node, num_experts=64 * has_experts, shares_kv=shares_kv), asked)
    assert len(set(asked.sizes)) == len(asked.sizes)
    for sizes in asked.sizes:
        assert prod(sizes[:4]) == devices
        assert sizes.tensor_parallel_size <= node
        assert sizes.context_parallel_size == 1 or prompt >= MIN_RING_TOKENS * sizes.context_parallel_size
        assert sizes.attention_data_parallel_size == 1 or has_experts or shares_kv
        assert sizes.expert_parallel_size in (1, sizes.num_devices // sizes.pipeline_parallel_size)
        assert sizes.expert_parallel_size == 1 or has_experts
        assert not sizes.sequence_parallel or sizes.tensor_parallel_size > 1
        twin = sizes._replace(sequence_parallel=not sizes.sequence_parallel)
        assert (twin in asked.sizes) == (sizes.tensor_parallel_size > 1)


def test_a_dense_model_on_8_gpus_has_4_cuts_of_which_3_may_split_the_sequence():
    asked = Asked()
    Auto(devices=8).choose(facts(), asked)
    cuts = [Sizes(1, 8), Sizes(2, 4), Sizes(4, 2), Sizes(8, 1)]
    assert [sizes for sizes in asked.sizes if not sizes.sequence_parallel] == cuts
    assert [sizes[:2] for sizes in asked.sizes if sizes.sequence_parallel] == [(2, 4), (4, 2), (8, 1)]


@pytest.mark.parametrize(
    ("split_s", "is_taken", "note"),
    [
        (0.009, True, r"without sequence parallelism .* is not better: 2.66 s"),
        (0.010, False, r"with sequence parallelism .* is not better: 2.66 s"),
        (0.011, False, r"with sequence parallelism .* is not better: 2.92 s"),
    ],
)
def test_the_sequence_is_split_where_that_is_faster_and_the_notes_say_by_how_much(split_s, is_taken, note):
    """0.1 s of prompt, 256 steps of 10 ms, or of split_s with sequence parallelism."""

    def price(sizes):
        return figures(decode_s=lambda n: split_s if sizes.sequence_parallel else 0.01)

    found = Auto(devices=2).choose(facts(), Asked(price))
    assert found.sizes == Sizes(2, sequence_parallel=is_taken)
    assert re.search(note, found.notes[3])
    assert "runner-up is pipeline 2" in found.notes[2]


def test_cost_and_slo_may_leave_gpus_out():
    for objective in (Objective.cost, Objective.slo):
        asked = Asked()
        Auto(devices=4, objective=objective).choose(facts(limits_s={"ttft": 9.0}), asked)
        assert {sizes.num_devices for sizes in asked.sizes} == {1, 2, 3, 4}


# The choice


costs = st.lists(st.floats(0.001, 1), min_size=8, max_size=8)


@given(costs, costs)
def test_the_least_latency_is_found(prefill, decode):
    """Against all candidates priced by hand; a lone request: prefill + 256 decode."""
    by_tensor = dict(zip((1, 2, 4, 8), zip(prefill, decode, strict=False), strict=False))

    def price(sizes):
        ttft_s, step_s = by_tensor[sizes.tensor_parallel_size]
        return figures(prefill_s=ttft_s, decode_s=lambda n: step_s)

    sizes, _ = Auto(devices=8).choose(facts(), Asked(price))
    least = min(ttft_s + 256 * step_s for ttft_s, step_s in by_tensor.values())
    ttft_s, step_s = by_tensor[sizes.tensor_parallel_size]
    assert ttft_s + 256 * step_s == least


def test_throughput_counts_full_batches_and_cost_their_price():
    """Tensor 8: 64 at once; pipeline 8: 640, as fast a token: ten times the throughput."""

    def price(sizes):
        most = 640 if sizes.pipeline_parallel_size == 8 else 64
        return figures(prompt_s=0.0, max_num_seqs=most, usd_per_hour=sizes.num_devices)

    assert Auto(devices=8, objective=Objective.throughput).choose(facts(), Asked(price)).sizes == Sizes(1, 8)
    cheapest = Auto(devices=8, objective=Objective.cost).choose(facts(), Asked(price))
    assert cheapest.sizes == Sizes(1, 8), "8 GPUs for ten times the tokens are cheaper than one"
    assert "per million" in cheapest.notes[0]


def test_the_smallest_that_meets_the_slo_is_taken():
    """80 ms a token on one GPU, 20 ms on four."""
    policy = Auto(devices=8, objective=Objective.slo)
    found = policy.choose(facts(limits_s={"tpot": 0.021}), Asked(by_devices))
    assert found.sizes == Sizes(4)
    assert "4 GPUs with 2 concurrent sequences" in found.notes[0]


def test_of_as_many_gpus_the_one_that_serves_the_most_within_the_slo_is_taken():
    """Both meet it; a step of pipeline 2 grows by 1 ms a sequence, of tensor 2 by 2."""

    def price(sizes):
        if sizes.num_devices < 2:
            return None
        each_s = 1e-3 if sizes.pipeline_parallel_size == 2 else 2e-3
        return figures(prompt_s=0.0, decode_s=lambda n: each_s * n)

    found = Auto(devices=2, objective=Objective.slo).choose(facts(limits_s={"tpot": 0.020}), Asked(price))
    assert found.sizes == Sizes(1, 2)
    assert "20 concurrent sequences" in found.notes[0]
    assert "10 concurrent sequences" in found.notes[2]


def test_ties_go_to_the_shallower_pipeline():
    assert Auto(devices=8).choose(facts(), Asked()).sizes == Sizes(8)


def test_what_does_not_fit_is_left_out_and_reported():
    asked = Asked(lambda sizes: None if sizes.tensor_parallel_size > 2 else by_devices(sizes))
    found = Auto(devices=8).choose(facts(), asked)
    assert found.sizes == Sizes(2, 4)
    assert found.notes[1].endswith("is bound by memory 70 %, communication 30 %.")
    assert "runner-up is pipeline 8" in found.notes[2]
    assert "4 layouts were not possible, such as tensor 4 x pipeline 2" in found.notes[4]


# Bad input


def test_rejects_when_nothing_fits_with_the_numbers():
    with pytest.raises(
        ValueError, match=r"layout.devices=1: no layout of toy \(16.0 GB of weights\) fits chip "
    ):
        Auto(devices=1).choose(facts(), Asked(lambda sizes: None))


def test_rejects_an_slo_that_nothing_meets_with_the_nearest():
    policy = Auto(devices=8, objective=Objective.slo)
    with pytest.raises(
        ValueError, match=r"up to 8 chip meets tpot 5 ms .* the nearest is tensor 8: .* TPOT 10.0 ms"
    ):
        policy.choose(facts(limits_s={"tpot": 0.005}), Asked(by_devices))


def test_rejects_sizes_beside_a_policy_that_chooses_them():
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: layout=auto chooses it; leave it at 1"):
        Auto().choose(facts(given=Sizes(1, 2)), Asked())


def test_rejects_sequence_parallelism_beside_it_likewise():
    with pytest.raises(ValueError, match="sequence_parallel=True: layout=auto chooses it; leave it at False"):
        Auto().choose(facts(given=Sizes(sequence_parallel=True)), Asked())


def test_rejects_an_slo_objective_without_an_slo():
    with pytest.raises(ValueError, match=r"layout.objective=slo: the run has no SLO"):
        Auto(objective=Objective.slo).choose(facts(), Asked())


@pytest.mark.parametrize("name", ["devices", "prompt_tokens", "output_tokens", "num_seqs"])
def test_rejects_less_than_one(name):
    with pytest.raises(ValueError, match=f"{name}=0: must be >= 1"):
        Auto(**{name: 0})


def test_more_sequences_than_fit_are_no_candidate():
    with pytest.raises(
        ValueError,
        match=r"layout.num_seqs=65: memory and slots suffice for 64 concurrent sequences of 1280 tokens",
    ):
        Auto(num_seqs=65).choose(facts(), Asked())


def test_prompts_of_others_come_between_tokens():
    """10 at once: 9 prompts of 0.1 s over 256 tokens beside a step of 10 ms."""
    policy = Auto(devices=1, num_seqs=10)
    found = policy.choose(facts(), Asked())
    assert found.notes[0].endswith(f"{0.1 + 256 * (0.01 + 9 * 0.1 / 256):.3g} s.")
    assert Load(1024, 256) == Load(policy.prompt_tokens, policy.output_tokens)
