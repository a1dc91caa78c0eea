"""Prompts for the training text and for the measurement."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from hwmodels.checks import read_text

TOPICS = (
    "rivers", "bread", "the Roman Empire", "bicycles", "photosynthesis", "chess", "earthquakes", "bees",
    "the moon", "jazz music", "solar panels", "coffee", "volcanoes", "libraries", "trains", "the human heart",
    "gardening", "whales", "the Internet", "ancient Egypt", "football", "vaccines", "mountains", "cheese",
    "robots", "the alphabet", "rain", "electric cars", "dogs", "money", "bridges", "sleep", "painting",
    "the ocean", "dinosaurs", "tea", "telescopes", "cities", "honey", "magnets",
)  # fmt: skip
HELD_OUT_TOPICS = ("glaciers", "violins", "the printing press", "penguins", "submarines", "chocolate")
TASKS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List five facts about {}.",
    "What is the history of {}?",
    "Why are people interested in {}?",
    "Write a short poem about {}.",
    "Write an email to a friend about {}.",
    "What are common questions about {}, and their answers?",
    "Describe {} in three sentences.",
    "Write a Python function that has something to do with {}.",
    "What are the advantages and disadvantages of {}?",
    "Give me a plan for a lesson about {}.",
)


class Prompts(NamedTuple):
    """Prompts to train on, and prompts of the measurement, of which none is among the others."""

    train: list[str]
    held_out: list[str]


def built_in(num_prompts: int, num_held_out: int, seed: int) -> Prompts:
    """Draws from every task with every topic; the topics of the measurement are others.

    Raises ValueError if there are not so many.
    """
    train = [task.format(topic) for topic in TOPICS for task in TASKS]
    held_out = [task.format(topic) for topic in HELD_OUT_TOPICS for task in TASKS]
    for name, wanted, there in (
        ("num_prompts", num_prompts, train),
        ("num_held_out", num_held_out, held_out),
    ):
        if wanted > len(there):
            raise ValueError(f"{name}={wanted}: must be <= {len(there)}; prompts of your own may be more")
    draw = random.Random(seed)
    return Prompts(draw.sample(train, num_prompts), draw.sample(held_out, num_held_out))


def from_file(path: Path, num_prompts: int, num_held_out: int, seed: int) -> Prompts:
    """Draws from the lines of a text file, without empty and repeated ones.

    num_prompts is a limit: the lines that are not held out may be fewer. Raises ValueError if the file cannot
    be read, or has no more than num_held_out prompts.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"prompts={path}: cannot be read: {error}") from None
    prompts = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if len(prompts) <= num_held_out:
        raise ValueError(
            f"prompts={path}: has {len(prompts)} prompts, and must have more than num_held_out="
            f"{num_held_out}; write one prompt per line"
        )
    random.Random(seed).shuffle(prompts)
    return Prompts(prompts[num_held_out:][:num_prompts], prompts[:num_held_out])
