"""Steps of an engine that speculates, whose launches are compiled: passes with drafts, and their drafters.

The drafters are those of the engine, with zero weights at the dimensions of their models.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from policies.speculation.engine.drafts import Shapes
from realengine.ahead.setups import DRAFTERS, DRAFTS, MODELS, Setup
from realengine.ahead.zeros import CPU, Step, WithoutProducts, cut
from realengine.model.backend import TRITON
from realengine.runner.executor import Executor
from realengine.runner.host_kv import HostKv
from realengine.runner.warm_up import drafting_work, pass_work
from realengine.runner.work import Draw, Padding, StepSize
from realengine.speculation.context import DrafterContext
from realengine.speculation.drafters.load import load_draft
from realengine.speculation.settings import NEEDS_MODEL, PROPOSERS, SpeculationSettings
from realengine.speculation.verifier import DeviceDrafts


def drafting_steps(setup: Setup, drafter: str) -> Iterator[Step]:
    """Yields passes of a setup, with sizes at and around those at which launches differ."""
    settings = _settings(setup, drafter)
    executor, drafts = _executor(setup, settings)
    shapes, longest = Shapes(settings.proposer), setup.shape.max_model_len
    padding = Padding(setup.shape.max_num_seqs, -(-longest // setup.shape.block_size))

    def passed(num_seqs: int, levels: int, context_len: int, draw: Draw) -> Step:
        num_drafts = int(shapes.rows[levels])
        size = StepSize(num_seqs, num_drafts, levels, shapes.max_depth if drafts else None)
        work = pass_work(size, context_len, draw, padding, shapes)
        name = f"pass of {num_seqs} x {1 + num_drafts}, context {context_len}, {draw.name}"
        return Step(name, lambda: executor.run(work))

    for num_seqs, num in product((1, 8, 64), sorted({0, 1, 2, shapes.max_depth})):
        yield passed(num_seqs, num, 100, Draw.greedy)
        yield passed(num_seqs, num, longest, Draw.sample)
    yield passed(8, shapes.max_depth, 1000, Draw.penalised)
    for num_decodes, chunks in ((0, [100]), (3, [5, 33, 200]), (64, [448])):
        work = drafting_work(num_decodes, shapes, chunks, 1000, padding.slot, drafts=drafts)
        name = f"{num_decodes} x {1 + shapes.num_rows}, chunks {chunks}"
        yield Step(name, partial(executor.run, work))


def _settings(setup: Setup, drafter: str) -> SpeculationSettings:
    config = dict(DRAFTERS[drafter])
    if issubclass(PROPOSERS[config["method"]], NEEDS_MODEL):  # type: ignore[arg-type]
        is_model = config["method"] in ("draft_model", "specinfer_tree")
        config["model"] = cut(MODELS[DRAFTS[setup.model] if is_model else setup.model])
    return SpeculationSettings.of(config)


def _executor(setup: Setup, settings: SpeculationSettings) -> tuple[Executor, bool]:
    """Builds the engine's executor and its drafter; returns, too, whether it drafts on the device."""
    shape = setup.shape
    decoder, cache = shape.model()
    context = DrafterContext(
        target=decoder,
        architecture=cut(shape.architecture),
        source=None,
        backend=TRITON,
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        device=CPU,
        group=decoder.group,
        block_size=shape.block_size,
        max_model_len=shape.max_model_len,
        max_num_seqs=shape.max_num_seqs,
        seed=0,
    )
    with WithoutProducts():
        draft = load_draft(settings, context)
    drafter = None if draft is None else draft.build(cache)
    executor = Executor(
        decoder,
        cache,
        TRITON,
        drafts=DeviceDrafts(settings.proposer, drafter, draft is not None and draft.draws),
        num_slots=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        host_kv=HostKv(cache, TRITON),
    )
    return executor, draft is not None
