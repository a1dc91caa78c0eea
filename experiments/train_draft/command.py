"""The steps of a training run: generate, read, train, measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experiments.train_draft import eagle, medusa
from experiments.train_draft.measure import Measured, engine_of, measure, table
from experiments.train_draft.settings import TrainSettings
from experiments.train_draft.texts import answered, read

SEQUENCES_OF_A_BATCH = 64
TRAIN = {"medusa": medusa.train, "eagle": eagle.train}


def run(
    settings: TrainSettings,
    prompts: Sequence[list[int]],
    held_out: Sequence[list[int]],
    say: Callable[[str], None],
) -> list[Measured]:
    """Trains every method on answers to prompts, and measures it on held-out ones, all as token ids.

    Raises ValueError for prompts and settings that give nothing to train on.
    """
    for name, given in (("prompts", prompts), ("held-out prompts", held_out)):
        if not given or not all(given):
            raise ValueError(f"{name}: must be at least one, and none of them empty")
    torch.set_num_threads(settings.threads)
    started = time.perf_counter()

    def told(line: str) -> None:
        say(f"{time.perf_counter() - started:6.0f} s  {line}")

    told(f"generate {len(prompts)} answers of at most {settings.num_tokens} tokens")
    longest = max(len(prompt) for prompt in prompts) + settings.num_tokens + 1
    texts = answered(engine_of(settings, longest, SEQUENCES_OF_A_BATCH), prompts, settings)
    num_answered = sum(len(text.tokens) - text.num_prompt_tokens for text in texts)
    told(f"compute the hidden states of {num_answered:,} answer tokens and their prompts")
    corpus = read(texts, settings)
    told(f"train on {num_answered:,} tokens, of which {len(corpus.vocabulary_U):,} are different")
    folders: dict[str, Path] = {}
    for method in settings.methods:
        folders[method] = settings.out / method
        TRAIN[method](corpus, settings, folders[method], told)
        told(f"wrote {folders[method]}")
    del corpus
    told(f"measure {len(held_out)} held-out prompts, {settings.num_measured_tokens} tokens each")
    results = measure(held_out, folders, settings)
    told("done")
    for line in table(results):
        say(line)
    return results
