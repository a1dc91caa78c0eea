"""Steps of an engine that speculates, whose launches are compiled: passes with drafts, and their drafters.

The drafters are those of the engine, with zero weights at the dimensions of their models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import numpy as np

from policies.speculation.engine.drafts import Shapes
from realengine.ahead.setups import DRAFTERS, DRAFTS, MODELS, Setup
from realengine.ahead.zeros import CPU, Step, WithoutProducts, cut
from realengine.model.backend import TRITON
from realengine.runner.host_kv import HostKv
from realengine.runner.work import SAMPLING, Draw, Padding, pack, pack_sampling
from realengine.speculation.context import DrafterContext
from realengine.speculation.drafters.load import load_draft
from realengine.speculation.executor import SpeculativeExecutor
from realengine.speculation.settings import NEEDS_MODEL, PROPOSERS, SpeculationSettings
from realengine.speculation.uniform import uniform_shape, uniform_words
from realengine.speculation.work import PassSize, VerifyShape, VerifyWork


def drafting_steps(setup: Setup, drafter: str) -> Iterator[Step]:
    """Yields passes of a setup, with sizes at and around those at which launches differ."""
    settings = _settings(setup, drafter)
    executor, drafts = _executor(setup, settings)
    shapes, longest = Shapes(settings.proposer), setup.shape.max_model_len
    padding = Padding(setup.shape.max_num_seqs, -(-longest // setup.shape.block_size))

    def passed(num_seqs: int, levels: int, context_len: int, draw: Draw) -> Step:
        num_drafts = int(shapes.rows[levels])
        size = PassSize(num_seqs, num_drafts, levels, shapes.max_depth if drafts else None)
        shape = uniform_shape(size, context_len, draw, has_tree=not shapes.is_chain)
        work = VerifyWork(verify=shape, words=uniform_words(shape, padding, token=0))
        name = f"pass of {num_seqs} x {1 + num_drafts}, context {context_len}, {draw.name}"
        return Step(name, lambda: executor.run(work))

    for num_seqs, num in product((1, 8, 64), sorted({0, 1, 2, shapes.max_depth})):
        yield passed(num_seqs, num, 100, Draw.greedy)
        yield passed(num_seqs, num, longest, Draw.sample)
    yield passed(8, shapes.max_depth, 1000, Draw.penalised)
    for num_decodes, chunks in ((0, [100]), (3, [5, 33, 200]), (64, [448])):
        work = _mixed(num_decodes, shapes, chunks, padding.slot, drafts=drafts)
        name = f"{num_decodes} x {1 + shapes.num_rows}, chunks {chunks}"
        yield Step(name, partial(executor.run, work))


def _settings(setup: Setup, drafter: str) -> SpeculationSettings:
    config = dict(DRAFTERS[drafter])
    if issubclass(PROPOSERS[config["method"]], NEEDS_MODEL):  # type: ignore[arg-type]
        is_model = config["method"] in ("draft_model", "specinfer_tree")
        config["model"] = cut(MODELS[DRAFTS[setup.model] if is_model else setup.model])
    return SpeculationSettings.of(config)


def _executor(setup: Setup, settings: SpeculationSettings) -> tuple[SpeculativeExecutor, bool]:
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
    executor = SpeculativeExecutor(
        decoder,
        cache,
        TRITON,
        proposer=settings.proposer,
        drafter=None if draft is None else draft.build(cache),
        draws=draft is not None and draft.draws,
        num_slots=shape.max_num_seqs,
        max_model_len=shape.max_model_len,
        host_kv=HostKv(cache, TRITON),
    )
    return executor, draft is not None


def _mixed(num_decodes: int, shapes: Shapes, chunks: Sequence[int], slot: int, *, drafts: bool) -> VerifyWork:
    """Returns a pass with all drafts of its decodes beside chunks, each of which completes a prompt."""
    num_rows, depth = 1 + shapes.num_rows, shapes.max_depth
    counts = np.array([num_rows] * num_decodes + list(chunks))
    starts = np.concatenate([[0], np.cumsum(counts)])
    num_seqs, num_tokens, num_ours = len(counts), int(starts[-1]), num_rows * num_decodes
    paths = 0 if shapes.is_chain else 1 + depth
    by_level = np.concatenate([[0], np.cumsum([paths] * num_decodes + list(chunks))])
    shape = VerifyShape(
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=num_ours,
        num_chunks=len(chunks),
        num_drawn=num_seqs,
        max_query_len=int(counts.max()),
        max_context_len=1000,
        max_depth=depth if num_decodes else 0,
        num_levels=depth if drafts else 0,
        draw=Draw.sample,
        num_path_rows=num_decodes * paths,
    )
    sections: list[np.ndarray] = [
        pack_sampling(np.zeros(num_seqs, SAMPLING)),
        np.zeros(num_tokens),
        np.concatenate([np.arange(count) for count in counts]),
        np.full(num_tokens, slot),
        np.full(num_seqs, slot),
        counts,
        starts,
        np.zeros(len(chunks)),
        np.concatenate([np.arange(num_ours), starts[num_decodes + 1 :] - 1]),
        np.concatenate([np.repeat(np.arange(num_decodes), num_rows), np.arange(num_decodes, num_seqs)]),
        np.full(num_seqs, slot),
        np.repeat(np.arange(num_decodes), paths),
        np.tile(np.arange(paths), num_decodes),
        by_level if shape.num_path_rows else by_level[:0],
    ]
    return VerifyWork(verify=shape, words=pack(sections))
