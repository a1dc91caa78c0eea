"""Builds an engine: the ranks with their memory, EngineCore, and the loop that drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

from policies.adapters.serving import Adapter, Registry, Residents
from policies.caching.pool import BlockPool, KvMemory, pool_of
from realengine.clock import Clock, WallClock
from realengine.engine import Engine
from realengine.model.backend import choose_device
from realengine.model.lora import AdapterBank
from realengine.model.quantization import Weights
from realengine.runner.executor import Executor
from realengine.runner.graphs import Drawn
from realengine.runner.launch import Result
from realengine.runner.memory import Memory
from realengine.runner.rank import build_executor, max_model_len_of, turns_of_adapters
from realengine.runner.ranks import Ranks
from realengine.runner.runner import Runner
from realengine.runner.work import Work
from realengine.serving.model import Model
from realengine.settings import EngineSettings, on_gpu_by_default
from realengine.sleep import SleepMode
from realengine.speculation.drafting import core_of


class Built(NamedTuple):
    """An engine, and its sleep mode, if it is enabled."""

    engine: Engine
    sleep_mode: SleepMode | None


def build_engine(model: Model, settings: EngineSettings, clock: Clock | None = None) -> Engine:
    """Builds an engine with weights loaded and graphs captured. Raises ValueError or RuntimeError."""
    return build(model, settings, clock).engine


def build(model: Model, settings: EngineSettings, clock: Clock | None = None) -> Built:
    """Builds an engine as `build_engine` does, and its sleep mode."""
    device = choose_device(settings.device)
    if settings.layout.num_devices == 1:
        executor, memory = build_executor(model, settings, device)
        engine, new_runner = _assembled(model, settings, executor, memory, None, clock)
        if not settings.enable_sleep_mode:
            return Built(engine, None)
        again = replace(settings, num_kv_blocks=memory.num_blocks)

        def rebuilt(weights: Weights | None) -> Executor:
            return build_executor(model, again, device, weights=weights)[0]

        return Built(engine, SleepMode(engine, executor, rebuilt, new_runner))
    settings.check_layout(model.architecture)
    ranks = Ranks(model, settings, device)
    executor, memory = build_executor(model, settings, device, ranks.mesh)
    execute = partial(ranks.execute, executor)
    return Built(assemble(model, settings, executor, memory, execute, clock), None)


def assemble(
    model: Model,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
    execute: Callable[[Work], Result] | None = None,
    clock: Clock | None = None,
) -> Engine:
    """Builds a new engine with empty caches around an executor that no other engine uses.

    execute: runs work on all ranks; None: there is one rank.
    """
    engine, _ = _assembled(model, settings, executor, memory, execute, clock)
    return engine


def _assembled(
    model: Model,
    settings: EngineSettings,
    executor: Executor,
    memory: Memory,
    execute: Callable[[Work], Result] | None,
    clock: Clock | None,
) -> tuple[Engine, Callable[[Executor], Runner]]:
    """Returns an engine, and the function that makes its runner of another executor like the given one."""
    max_model_len = max_model_len_of(model.architecture, settings)
    block_size = settings.caching.block_size
    pool = pool_of(
        settings.caching,
        KvMemory(
            memory.num_blocks,
            bytes_per_token=memory.block_bytes / block_size,
            max_model_len=max_model_len,
        ),
    )
    num_stages = settings.pipeline_parallel_size
    overlap = on_gpu_by_default(settings.overlap, executor.device) and num_stages == 1
    clock = clock or WallClock()
    vocab_size = model.architecture.vocab_size
    core, drafting = core_of(
        settings.speculation,
        clock,
        overlap=overlap and (settings.speculation is None or settings.max_iterations == 1),
        vocab_size=vocab_size,
        batching=settings.batching,
        scheduling=settings.scheduling,
        block_pool=pool,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=max_model_len,
        predictor=settings.predictor,
        num_swap_blocks=memory.num_swap_blocks,
        names_blocks=True,
        release=settings.release._replace(discards_unread=False),  # it reads and keeps every token
        max_batches=num_stages if num_stages > 1 else None,
        max_batch_seqs=settings.pp_max_micro_batch_size if num_stages > 1 else None,
        data_parallel=settings.data_parallel,
        residents=_residents(model, settings, executor.adapters, pool),
    )

    def new_runner(executor: Executor) -> Runner:
        run = execute or executor.run
        here = cast("Callable[[Work], Drawn | None]", run)  # an engine with drafts waits for no other rank
        return Runner(
            core,
            run,
            graphs=executor.graphs,
            adapters=executor.adapters,
            window=executor.window,
            drafts=None if drafting is None else drafting.packer(here, executor.graphs),
            seed=settings.seed,
        )

    engine = Engine(
        core,
        new_runner(executor),
        vocab_size=vocab_size,
        eos_token_ids=frozenset(model.architecture.eos_token_ids),
        tokenizer=model.tokenizer,
        overlap=overlap if drafting is None else drafting.reads_late,
        max_iterations=settings.max_iterations,
        clock=clock,
        drafting=drafting,
    )
    engine.start_s = executor.start_s
    return engine, new_runner


def _residents(
    model: Model, settings: EngineSettings, bank: AdapterBank | None, pool: BlockPool
) -> Residents | None:
    """Returns the policy that decides which adapters are resident; None if no adapters are served."""
    if bank is None:
        return None
    served = [Adapter(name=name, rank=rank) for name, rank in bank.ranks.items()]
    known = Registry(served, model.architecture.model_type)
    return turns_of_adapters(settings, bank.max_rank).residents(known, pool)
