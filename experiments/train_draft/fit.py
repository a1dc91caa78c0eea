"""The training loop: Adam, a learning rate that falls as a cosine, and a report of each epoch's loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from experiments.train_draft.settings import TrainSettings

WARM_UP_SHARE = 0.05
MOST_GRADIENT = 1.0


def fit(
    parameters: Iterable[torch.nn.Parameter],
    num_examples: int,
    loss_of: Callable[[torch.Tensor], torch.Tensor],
    settings: TrainSettings,
    *,
    batch_size: int,
    report: Callable[[str], None],
) -> list[float]:
    """Minimises a loss over examples in a new order each epoch; returns the mean loss of every epoch.

    loss_of: computes the mean loss of the examples with these numbers, int64.
    """
    trained = list(parameters)
    num_batches = -(-num_examples // batch_size)
    num_steps = num_batches * settings.epochs
    optimiser = torch.optim.Adam(trained, lr=settings.learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _share(step, num_steps))
    generator = torch.Generator().manual_seed(settings.seed)
    losses = []
    for epoch in range(settings.epochs):
        total = 0.0
        for numbers in torch.randperm(num_examples, generator=generator).split(batch_size):
            optimiser.zero_grad()
            loss = loss_of(numbers)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, MOST_GRADIENT)
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(numbers)
        losses.append(total / num_examples)
        report(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return losses


def _share(step: int, num_steps: int) -> float:
    """Returns the share of the learning rate at a step: it rises over the first steps, then falls to 0."""
    warm_up = max(1, round(WARM_UP_SHARE * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))
