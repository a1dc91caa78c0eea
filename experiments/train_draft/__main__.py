"""Trains Medusa heads and an EAGLE layer for SmolLM2-135M on text of its own, and measures their acceptance.

    python -m experiments.train_draft --out DIR

The target answers prompts; its hidden states are computed once, and heads and layer are trained on them. The
folders DIR/medusa and DIR/eagle have the published layouts: LLM(speculative_config={"method": "eagle",
"model": "DIR/eagle", "num_speculative_tokens": 3}) reads them. The run ends with a table: output tokens per
second with and without drafts, and the acceptance by place on prompts that were not trained on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from experiments.train_draft import eagle, medusa
from experiments.train_draft.measure import Measured, engine_of, measure, table
from experiments.train_draft.prompts import built_in, from_file
from experiments.train_draft.settings import METHODS, TrainSettings
from experiments.train_draft.texts import answered, read
from realengine.serving.model import Model
from realengine.serving.tokenizer import Tokenizer

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and measures; returns 2 and prints one sentence for settings that cannot be served."""
    options = _parser().parse_args(arguments)
    try:
        settings = TrainSettings(
            out=options.out,
            model=options.model if options.model == "smollm2" else Path(options.model),
            methods=tuple(options.method),
            num_heads=options.num_heads,
            num_drafts=tuple(options.num_drafts or sorted({1, options.num_heads})),
            num_prompts=options.num_prompts,
            num_held_out=options.num_held_out,
            num_tokens=options.num_tokens,
            num_measured_tokens=options.num_measured_tokens,
            temperature=options.temperature,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            threads=options.threads,
            device=options.device,
            seed=options.seed,
        )
        counts = settings.num_prompts, settings.num_held_out, settings.seed
        texts = built_in(*counts) if options.prompts is None else from_file(options.prompts, *counts)
        tokenizer = Model.of(settings.model).tokenizer
        if tokenizer is None:
            raise ValueError(f"--model {settings.model}: has no tokenizer.json, which the prompts need")
        prompts, held_out = ([_asked(tokenizer, text) for text in each] for each in texts)
        run(settings, prompts, held_out, lambda line: print(line, flush=True))
    except (ValueError, ImportError, RuntimeError) as error:
        print(f"python -m experiments.train_draft: {error}", file=sys.stderr)
        return 2
    return 0


def _asked(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.apply_chat([{"role": "user", "content": text}])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.train_draft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, default = parser.add_argument, TrainSettings.__dataclass_fields__

    def number(name: str, kind: type, text: str) -> None:
        value = default[name].default
        add(f"--{name.replace('_', '-')}", type=kind, default=value, help=f"{text} (default {value})")

    add("--out", type=Path, required=True, help="new or empty folder for the checkpoints")
    add("--method", nargs="+", choices=METHODS, default=list(METHODS), help="what is trained (default: both)")
    add("--model", default="smollm2", help="smollm2, a .gguf file or a folder in Hugging Face's format")
    add("--prompts", type=Path, help="file with one prompt per line (default: built-in prompts)")
    number("num_heads", int, "number of Medusa heads")
    add("--num-drafts", type=int, nargs="+", help="draft tokens to measure (default: 1, and num-heads)")
    number("num_prompts", int, "number of prompts whose answers are trained on")
    number("num_held_out", int, "number of prompts of the measurement")
    number("num_tokens", int, "most tokens of an answer that is trained on")
    number("num_measured_tokens", int, "most tokens of an answer of the measurement")
    number("temperature", float, "temperature of the training text; 0: greedy")
    number("epochs", int, "number of times that the text is trained on")
    number("learning_rate", float, "highest learning rate of Adam")
    number("threads", int, "CPU threads")
    add("--device", default="cpu", help="cpu or cuda (default cpu)")
    number("seed", int, "seed of prompts, weights and order")
    return parser


if __name__ == "__main__":
    sys.exit(main())
