"""A core reproduces the decisions of the engine from the same inputs."""

import json
from dataclasses import replace

import pytest

from experiments.validate.engine.recording import Recorder, load
from experiments.validate.engine.replay import replay
from policies.batching.chunked import Chunked
from policies.batching.splitfuse import SplitFuse
from policies.batching.static import Dynamic, Static
from policies.batching.whole_prompts import PrefillFirst
from policies.caching.paged import Paged
from policies.caching.pool import KvMemory
from policies.caching.prefix import PrefixCaching
from policies.caching.radix import Radix
from policies.caching.selective import SnapKv
from policies.caching.tiered import Tiered
from policies.core.endings import Ends
from policies.core.engine import EngineCore
from policies.scheduling.fcfs import Fcfs
from policies.scheduling.mlfq import Mlfq
from policies.scheduling.priority import Priority
from realengine.serving.sampling_params import SamplingParams
from tests.realengine.small_models import make, prompts

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head_dim, float32

SWAP = Fcfs(preemption_mode="swap")
WORLDS = {
    "chunked": {"batching": Chunked(max_num_batched_tokens=9)},
    "prefill_first": {"batching": PrefillFirst(max_num_batched_tokens=32)},
    "splitfuse": {"batching": SplitFuse(max_num_batched_tokens=16)},
    "static": {"batching": Static(batch_size=3)},
    "dynamic": {"batching": Dynamic(batch_size=4, max_queue_delay_s=0.01)},
    "snapkv": {
        "batching": Chunked(max_num_batched_tokens=9),
        "caching": SnapKv(num_kept_tokens=18, num_window_tokens=4, block_size=4),
    },
    "recompute": {"num_kv_blocks": 9},
    "priority": {"num_kv_blocks": 9, "scheduling": Priority()},
    "swap": {"num_kv_blocks": 20, "caching": Paged(block_size=4), "scheduling": SWAP},
    "prefix_swap": {"num_kv_blocks": 20, "caching": PrefixCaching(block_size=4), "scheduling": SWAP},
    "mlfq": {
        "num_kv_blocks": 20,
        "caching": Radix(block_size=4),
        "scheduling": Mlfq(quantum_tokens=3, num_levels=3, preemption_mode="swap"),
    },
    "tiered": {
        "num_kv_blocks": 30,
        "caching": Tiered(block_size=4, host_gib=50 * 4 * TOKEN_BYTES / 2**30, min_load_tokens=4),
    },
}


def fresh_core(llm, world):
    """Returns a core in the state in which the engine's core began."""
    used = llm.engine.core
    memory = KvMemory(used.block_pool.num_blocks, TOKEN_BYTES, max_model_len=128)
    return EngineCore(
        ends=Ends.at_once if used._ends is None else Ends.one_step_late,
        batching=world.get("batching", Chunked()),
        scheduling=world.get("scheduling", Fcfs()),
        block_pool=world.get("caching", PrefixCaching()).pool(memory),
        max_num_seqs=used.max_num_seqs,
        max_model_len=128,
        num_swap_blocks=used.num_free_swap_blocks,
    )


def recorded(world, **settings):
    llm = make(**world, **settings)
    recorder = Recorder(llm.engine.core)
    llm.engine.observer = recorder
    stopping = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=(67,))
    llm.generate(prompts(), stopping)
    llm.generate(prompts(), replace(stopping, n=3, temperature=1.0, seed=5, stop_token_ids=(1, 2, 3, 4)))
    return llm, recorder.recording({})


@pytest.mark.sampled(fast=6, slow=12)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(
    "settings", [{}, {"overlap": True, "max_iterations": 4}], ids=["in turn", "overlapped"]
)
def test_every_decision_is_made_again(name, settings, tmp_path):
    llm, recording = recorded(WORLDS[name], **settings)
    recording.save(tmp_path)
    loaded = load(tmp_path)
    assert loaded.is_whole
    equivalence = replay(loaded, fresh_core(llm, WORLDS[name]))
    assert equivalence.difference is None
    assert equivalence.num_equal == len(recording.steps) > 20
    if "num_kv_blocks" in WORLDS[name] and name != "tiered":
        assert recording.steps["preempted"].sum() > 0


def test_times_are_in_order_and_complete(tmp_path):
    _, recording = recorded({})
    requests = recording.requests
    assert (requests["status"] == "finished").all()
    for before, after in [
        ("arrival_s", "known_s"),
        ("known_s", "scheduled_s"),
        ("scheduled_s", "first_token_s"),
        ("first_token_s", "last_token_s"),
    ]:
        assert (requests[before] <= requests[after]).all()
    assert (recording.steps["start_s"] <= recording.steps["end_s"]).all()
    for row in requests.itertuples():
        times_s = recording.token_times_s[row.request_id]
        assert times_s == sorted(times_s)
        if row.samples == 1:
            assert len(times_s) == row.output_tokens


def test_another_policy_is_distinguished_with_what_led_there():
    llm, recording = recorded(WORLDS["recompute"])
    other = fresh_core(llm, {"batching": Chunked(max_num_batched_tokens=31)})
    equivalence = replay(recording, other)
    assert 0 <= equivalence.num_equal < equivalence.num_steps
    difference = equivalence.difference
    assert difference.step == equivalence.num_equal
    assert "digest" in difference.recorded
    assert "tokens by request" in difference.replayed
    assert "waiting" in difference.state


def test_a_recording_that_was_cut_short_gives_its_complete_beginning(tmp_path):
    llm, recording = recorded({})
    recording.save(tmp_path)
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    (tmp_path / "events.jsonl").write_text("\n".join(lines[: len(lines) * 2 // 3])[:-5])
    loaded = load(tmp_path)
    assert not loaded.is_whole
    assert 0 < len(loaded.steps) < len(recording.steps)
    assert replay(loaded, fresh_core(llm, {})).difference is None


def test_what_is_no_recording_is_said(tmp_path):
    with pytest.raises(ValueError, match="not a recording"):
        load(tmp_path)
    _, recording = recorded({})
    recording.save(tmp_path)
    steps = recording.steps.copy()
    steps.loc[7, "start_s"] = 0.0
    steps.to_parquet(tmp_path / "steps.parquet")
    with pytest.raises(ValueError, match="step 7: its time goes backwards"):
        load(tmp_path)
    (tmp_path / "recording.json").write_text(json.dumps([]))
