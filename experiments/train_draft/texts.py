"""The training text: answers of the target, and the hidden states that a drafter gets from it.

Letters of array names: T tokens of all texts, H hidden size, V vocabulary, U tokens that the texts use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from experiments.train_draft.settings import TrainSettings
from realengine.model.architecture import Architecture
from realengine.model.backend import choose_backend
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.runner.batch import Batch
from realengine.serving.llm import LLM
from realengine.serving.model import weights_of
from realengine.serving.sampling_params import SamplingParams
from realengine.weights.load import load_weights

BLOCK_SIZE = 16
NUM_TOKENS_OF_A_PASS = 1024


class Text(NamedTuple):
    """A prompt and its answer as token ids."""

    tokens: list[int]
    num_prompt_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Texts with the target's hidden states, and its head over the tokens that they use."""

    texts: list[Text]
    starts: list[int]
    """Row of each text's first token."""
    words_T: torch.Tensor
    """Tokens as their numbers among the used ones, int64."""
    hidden_TH: torch.Tensor
    """Outputs of the target's final norm, from which it computes logits: what a drafter gets."""
    vocabulary_U: torch.Tensor
    """Ids of the used tokens, ascending."""
    head_UH: torch.Tensor
    """The target's head for the used tokens. Softmaxes run over them: a tenth of SmolLM2's vocabulary."""
    embedding_UH: torch.Tensor
    head_VH: torch.Tensor
    architecture: Architecture


def answered(llm: LLM, prompts: Sequence[list[int]], settings: TrainSettings) -> list[Text]:
    """Generates the answer of every prompt. Raises ValueError if a prompt cannot be served."""
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.num_tokens)
    texts = []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        if output.error is not None:
            raise ValueError(f"prompts: {output.error}")
        texts.append(Text([*prompt, *output.outputs[0].token_ids], len(prompt)))
    return texts


def read(texts: Sequence[Text], settings: TrainSettings) -> Corpus:
    """Computes the hidden states of every token with the target's decoder, in float32."""
    architecture, source = weights_of(settings.model)
    device = torch.device(settings.device)
    weights = load_weights(source, architecture, torch.float32, device, seed=settings.seed)
    backend = choose_backend(None, device)
    decoder = Decoder(architecture, weights, backend, max(len(text.tokens) for text in texts))
    hidden = []
    for group in _groups(texts):
        num_blocks = sum(-(-len(text.tokens) // BLOCK_SIZE) for text in group)
        cache = KvCache(architecture, num_blocks, BLOCK_SIZE, torch.float32, device)
        hidden.append(decoder.states(_batch(group, device), cache).hidden_TH)
    tokens_T = torch.tensor([token for text in texts for token in text.tokens], device=device)
    vocabulary_U, words_T = tokens_T.unique(return_inverse=True)
    head_VH, embedding_VH = weights["head.weight"], weights["embedding.weight"]
    assert isinstance(head_VH, torch.Tensor)
    assert isinstance(embedding_VH, torch.Tensor)
    starts = [0]
    for text in texts[:-1]:
        starts.append(starts[-1] + len(text.tokens))
    return Corpus(
        texts=list(texts),
        starts=starts,
        words_T=words_T,
        hidden_TH=torch.cat(hidden),
        vocabulary_U=vocabulary_U,
        head_UH=head_VH[vocabulary_U],
        embedding_UH=embedding_VH[vocabulary_U],
        head_VH=head_VH,
        architecture=architecture,
    )


def _groups(texts: Sequence[Text]) -> Iterator[list[Text]]:
    """Yields the texts in groups of about NUM_TOKENS_OF_A_PASS tokens."""
    group: list[Text] = []
    for text in texts:
        group.append(text)
        if sum(len(each.tokens) for each in group) >= NUM_TOKENS_OF_A_PASS:
            yield group
            group = []
    if group:
        yield group


def _batch(texts: Sequence[Text], device: torch.device) -> Batch:
    """Returns whole texts as one batch of chunks; block 0 of a cache is not used."""
    lengths = [len(text.tokens) for text in texts]
    tables = torch.zeros(len(texts), -(-max(lengths) // BLOCK_SIZE), dtype=torch.int32)
    positions, slots, first = [], [], 1
    for number, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE)
        tables[number, :num_blocks] = torch.arange(first, first + num_blocks)
        positions.append(torch.arange(length))
        slots.append(positions[-1] + first * BLOCK_SIZE)
        first += num_blocks
    return Batch(
        tokens_T=torch.tensor([token for text in texts for token in text.tokens], device=device),
        positions_T=torch.cat(positions).to(device),
        slots_T=torch.cat(slots).to(device),
        block_tables_BM=tables.to(device),
        chunk_starts=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        context_lens_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        sampled_rows_S=None,
        num_decodes=0,
        max_query_len=max(lengths),
        max_context_len=max(lengths),
    )
