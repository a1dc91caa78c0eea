"""Small policies that keep their promises; tests break them."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Filling:
    """Decodes, continues prompts, admits in an order: the common part of the broken policies below."""

    max_num_batched_tokens: int = 64

    def fill(self, view, step, now):
        step.budget(self.max_num_batched_tokens)
        step.decode_all()
        for seq in view.prefilling:
            step.prefill(seq, step.tokens_left)
        for seq in self.order(list(view.waiting)):
            if not step.admit(seq, step.tokens_left):
                break

    def order(self, waiting):
        return waiting


@dataclass(frozen=True, kw_only=True)
class Guessing:
    """A predictor of a fixed length, which the predictors below replace."""

    needs_truth: ClassVar[bool] = False

    def predict(self, request, true_num_tokens):
        return min(10, request.max_tokens or 10)

    def observe(self, request, num_output_tokens):
        pass


@dataclass(kw_only=True)
class Scales:
    """Wants as many replicas as there are."""

    interval_s: float = 10.0
    min_replicas: int = 1
    max_replicas: int = 4

    def target(self, pool, now):
        return min(4, pool.num_replicas + pool.num_starting)
