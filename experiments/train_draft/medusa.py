"""Medusa's heads on a frozen target: Cai et al., ICML 2024, section 2.2.1 (Medusa-1).

Head i predicts token t + 2 + i from the target's hidden state at t, which itself predicts t + 1:

    z = h + SiLU(W h + b)          logits = E M z          E: the target's head [V, H]

W, b and M are trained, E is not. M is folded into the stored projection E M, so that a checkpoint is of the
published layout, costs nothing more to run, and its projection is trained with H^2 parameters instead of
V H. At the start W, b = 0 and M = 1: a head equals the target's.

Letters of array names: N rows, H hidden size, V vocabulary, U tokens that the texts use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from experiments.train_draft.fit import fit
from experiments.train_draft.settings import TrainSettings
from experiments.train_draft.texts import Corpus

ROWS_OF_A_BATCH = 256
FILE = "medusa_lm_head.safetensors"


class Head(torch.nn.Module):
    """The trained part of a head."""

    def __init__(self, hidden_size: int, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, hidden_size, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, device=device))
        self.mixing = torch.nn.Parameter(torch.eye(hidden_size, device=device))

    def forward(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Computes the states [N, H] that the target's head reads."""
        return F.linear(hidden_NH + F.silu(F.linear(hidden_NH, self.weight, self.bias)), self.mixing)


def rows_of(corpus: Corpus, head: int) -> torch.Tensor:
    """Returns the rows t of answers whose token t + 2 + head is in the text, int64.

    The first row of a text is the prompt's last token, as when the engine drafts for the first time.
    """
    rows = [
        torch.arange(start + text.num_prompt_tokens - 1, start + len(text.tokens) - 2 - head)
        for start, text in zip(corpus.starts, corpus.texts, strict=True)
        if len(text.tokens) - 2 - head > text.num_prompt_tokens - 1
    ]
    if not rows:
        raise ValueError(
            f"head {head}: no answer is long enough to have a token for it; set num_heads lower, or "
            "num_tokens higher"
        )
    return torch.cat(rows)


def train(
    corpus: Corpus, settings: TrainSettings, folder: Path, report: Callable[[str], None]
) -> list[list[float]]:
    """Trains the heads one after the other and writes them; returns the losses of each by epoch."""
    tensors: dict[str, torch.Tensor] = {}
    losses = []
    for number in range(settings.num_heads):
        rows_T = rows_of(corpus, number)
        head = Head(corpus.architecture.hidden_size, corpus.hidden_TH.device)

        def loss_of(
            numbers: torch.Tensor, rows_T: torch.Tensor = rows_T, head: Head = head, number: int = number
        ) -> torch.Tensor:
            rows = rows_T[numbers].to(corpus.hidden_TH.device)
            logits_NU = F.linear(head(corpus.hidden_TH[rows]), corpus.head_UH)
            return F.cross_entropy(logits_NU, corpus.words_T[rows + 2 + number])

        def say(line: str, number: int = number) -> None:
            report(f"medusa, head {number}, {line}")

        losses.append(
            fit(head.parameters(), len(rows_T), loss_of, settings, batch_size=ROWS_OF_A_BATCH, report=say)
        )
        projection_VH = corpus.head_VH @ head.mixing.detach()
        tensors |= {
            f"{number}.0.linear.weight": head.weight.detach(),
            f"{number}.0.linear.bias": head.bias.detach(),
            f"{number}.1.weight": projection_VH,
        }
    folder.mkdir(parents=True)
    save_file({name: each.bfloat16().cpu() for name, each in tensors.items()}, folder / FILE)
    config = {"medusa_num_heads": settings.num_heads, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return losses
