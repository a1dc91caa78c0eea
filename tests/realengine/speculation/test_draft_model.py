"""A draft model proposes what it would propose from the whole text, whatever the passes before have done."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kernels.launch import compiling_for
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH, TRITON
from realengine.model.decoder import Decoder
from realengine.runner.batch import Batch
from realengine.speculation.drafter import DecodedRows, Passed, Start
from realengine.speculation.drafters.draft_model import DraftModel
from realengine.weights.load import load_weights
from tests.realengine.model.test_decoder import CONFIGS, CPU, cache_of, make
from tests.realengine.speculation.passes import Row, Sequences, continuation

torch.set_num_threads(1)

PROMPTS = (1, 7, 12, 5)
MAX_LEN = 64
UNWRITTEN = 99.0


def drafter_of(config="llama", num_blocks=70, max_len=MAX_LEN, **settings):
    spec, weights, decoder = make(config)
    cache = cache_of(spec, num_blocks=num_blocks)
    for layer in cache.layers.values():  # KV that was never written must not matter
        layer.keys.fill_(UNWRITTEN)
        layer.values.fill_(UNWRITTEN)
    return spec, weights, DraftModel(decoder, cache, TORCH, max_len, **settings)


def prompt_rows(seqs, draw, lengths=PROMPTS):
    """Returns the rows of whole prompts, which complete."""
    rows = []
    for seq, length in enumerate(lengths):
        seqs.known[seq] = [draw.randrange(96) for _ in range(length)]
        rows.append(Row(seq, list(seqs.known[seq]), length, draw.randrange(96), is_decode=False))
    return rows


def decode_row(seqs, draw, seq, drafts, num_accepted):
    tokens = [seqs.known[seq][-1], *drafts]
    return Row(seq, tokens, num_accepted + 1, draw.randrange(96), is_decode=True)


@pytest.mark.parametrize("is_told", [False, True], ids=["all_rows", "last_rows"])
@pytest.mark.parametrize("is_joined", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("config", ["llama", "mistral", "qwen3_moe"])
def test_drafts_equal_those_of_the_whole_text_after_any_acceptance(config, is_joined, is_told):
    spec, weights, drafter = drafter_of(config)
    seqs, draw = Sequences(70, 4, MAX_LEN, len(PROMPTS)), random.Random(5)
    rows, drafted = prompt_rows(seqs, draw), {}
    for num_levels in (3, 1, 4, 0, 2, 3, 5, 2):
        # Not every sequence drafts in every pass, and fewer tokens may be verified than were drafted.
        drafting = [seq for seq in range(len(PROMPTS)) if num_levels and draw.random() < 0.8]
        passed = seqs.passed(rows, is_told=is_told, drafts_next=is_joined and bool(drafting))
        drafter.follow(passed)
        drafted = {}
        if drafting:
            tokens = drafter.draft(passed, seqs.start(drafting, num_padding=2), num_levels).tokens_NK
            assert tokens.shape == (len(drafting) + 2, num_levels)
            drafted = dict(zip(drafting, tokens.tolist(), strict=False))
        for seq, tokens in drafted.items():
            assert tokens == continuation(spec, weights, seqs.known[seq], num_levels)
        rows = []
        for seq in range(len(PROMPTS)):
            drafts = drafted.get(seq, [])[: draw.choice([num_levels, num_levels, 1])]
            num_accepted = draw.choice([0, len(drafts), draw.randint(0, len(drafts))])
            rows.append(decode_row(seqs, draw, seq, drafts, num_accepted))


@pytest.mark.parametrize("is_joined", [False, True], ids=["apart", "joined"])
def test_chunks_of_a_prompt_run_beside_decodes_and_after_prefix_hits(is_joined):
    spec, weights, drafter = drafter_of()
    seqs, draw = Sequences(70, 4, MAX_LEN, 2), random.Random(6)

    def drafts_after(rows, drafting):
        passed = seqs.passed(rows, is_told=True, drafts_next=is_joined)
        drafter.follow(passed)
        found = drafter.draft(passed, seqs.start(drafting), 3).tokens_NK.tolist()
        assert found == [continuation(spec, weights, seqs.known[seq], 3) for seq in drafting]
        return found

    seqs.known[0] = [draw.randrange(96) for _ in range(6)]
    (drafts,) = drafts_after([Row(0, list(seqs.known[0]), 6, 7, is_decode=False)], [0])
    (drafts,) = drafts_after([decode_row(seqs, draw, 0, drafts, 3)], [0])
    seqs.known[1] = [*seqs.known[0][:8], *[draw.randrange(96) for _ in range(9)]]
    seqs.share(1, 0, 8)
    first = Row(1, seqs.known[1][8:13], 5, None, is_decode=False)
    (drafts,) = drafts_after([decode_row(seqs, draw, 0, drafts, 1), first], [0])
    rest = Row(1, seqs.known[1][13:], 4, 9, is_decode=False)
    drafts_after([decode_row(seqs, draw, 0, drafts, 0), rest], [0, 1])


def test_without_all_rows_the_drafts_of_other_drafters_would_be_missing():
    """A draft that verifies others' tokens, too, must compute all accepted tokens."""
    spec, weights, drafter = drafter_of(verifies_others=True)
    seqs, draw = Sequences(70, 4, MAX_LEN, 1), random.Random(7)
    seqs.known[0] = [1, 2, 3]
    drafter.follow(seqs.passed([Row(0, [1, 2, 3], 3, 4, is_decode=False)], is_told=True))
    others = [draw.randrange(96) for _ in range(4)]
    passed = seqs.passed([decode_row(seqs, draw, 0, others, 4)], is_told=True)
    drafter.follow(passed)
    found = drafter.draft(passed, seqs.start([0]), 3).tokens_NK.tolist()
    assert found == [continuation(spec, weights, seqs.known[0], 3)]


def test_drafts_before_the_end_of_the_context_are_right_and_those_behind_it_write_nothing():
    spec, weights, drafter = drafter_of(max_len=18, num_blocks=5)
    seqs, draw = Sequences(5, 4, 18, 1), random.Random(8)
    rows = prompt_rows(seqs, draw, lengths=(15,))
    passed = seqs.passed(rows)
    drafter.follow(passed)
    found = drafter.draft(passed, seqs.start([0]), 6).tokens_NK.tolist()
    assert found[0][:3] == continuation(spec, weights, seqs.known[0], 3)
    written = drafter.cache.layers[0].keys[seqs.tables[0].long()].flatten(0, 1)[:, 0, 0] != UNWRITTEN
    assert written.tolist() == [True] * 18 + [False] * 2


def test_drafting_reads_nothing_back_to_the_host():
    """A CUDA graph could not read back: fake tensors have no values, and reading one raises."""
    launched = []
    num_seqs, num_drafts = 3, 2
    with FakeTensorMode(), compiling_for("sm_90", lambda kernel, *_: launched.append(kernel.__name__)):
        spec = Architecture.from_hf(CONFIGS["llama"])
        weights = load_weights(None, spec, torch.float16, CPU)
        drafter = DraftModel(Decoder(spec, weights, TRITON, 128), cache_of(spec, torch.float16), TRITON, 128)
        num_tokens = num_seqs * (1 + num_drafts)
        tables = torch.zeros(num_seqs, 8, dtype=torch.int32)
        batch = Batch(
            tokens_T=torch.zeros(num_tokens, dtype=torch.int64),
            positions_T=torch.zeros(num_tokens, dtype=torch.int64),
            slots_T=torch.zeros(num_tokens, dtype=torch.int64),
            block_tables_BM=tables,
            chunk_starts=torch.arange(num_seqs + 1, dtype=torch.int32) * (1 + num_drafts),
            context_lens_B=torch.zeros(num_seqs, dtype=torch.int32),
            sampled_rows_S=None,
            num_decodes=0,
            max_query_len=1 + num_drafts,
            max_context_len=32,
        )
        slots = torch.zeros(num_seqs, dtype=torch.int64)
        passed = Passed(
            batch=batch,
            following_T=batch.tokens_T,
            states=None,
            decoded=DecodedRows(num_seqs, num_tokens, slots),
            drafts_next=True,
        )
        start = Start(
            slots_N=slots,
            newest_N=slots,
            positions_N=slots,
            rows_N=slots,
            tables_NM=tables,
            max_context_len=32,
        )
        launched.clear()
        drafter.follow(passed)
        assert not launched
        assert drafter.draft(passed, start, 3).tokens_NK.shape == (num_seqs, 3)
        with pytest.raises(DataDependentOutputException):
            slots.sum().item()
    assert launched.count("decode_attention_kernel") == 3 * spec.num_layers
    assert "prefill_attention_kernel" not in launched
