"""Features join the engine as parts: all of them have one loop, runner, executor and class of graphs."""

import pytest

pytest.importorskip("torch", reason="the engine needs torch")

from policies.caching.streaming import StreamingLlm
from tests.realengine.small_models import make
from tests.realengine.speculation.methods import DRAFTERS

FEATURES = {
    "plain": {},
    "overlap": {"overlap": True},
    "host drafts": {"speculative_config": DRAFTERS["ngram"]},
    "drafts": {"speculative_config": DRAFTERS["medusa_tree"]},
    "overlapped drafts": {"speculative_config": DRAFTERS["draft_model"], "overlap": True},
    "kept window": {"caching": StreamingLlm(num_sink_tokens=2, num_recent_tokens=10, block_size=4)},
}


def test_every_feature_has_the_classes_of_a_plain_engine():
    kinds = set()
    for settings in FEATURES.values():
        engine = make(**settings).engine
        executor = engine.runner.execute.__self__
        kinds.add((type(engine), type(engine.runner), type(executor)))
    assert len(kinds) == 1
    assert not any(kind.__subclasses__() for kind in kinds.pop())
