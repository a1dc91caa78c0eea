"""Steps of mixed chunks and decodes on a Decoder, without an engine: random splits, shuffled blocks."""

import torch

from realengine.runner.batch import Batch


def prompts(vocab_size, lengths=(1, 15, 33, 16, 40, 7), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def all_logits(decoder, cache, sequences, seed=0, most=9):
    """Computes the logits [T, V] of every sequence in steps of 1 to `most` tokens of each, in one batch."""
    generator = torch.Generator().manual_seed(seed)
    tables = block_tables(cache, sequences, generator)
    done = [0] * len(sequences)
    found = [[] for _ in sequences]
    while any(num < len(tokens) for num, tokens in zip(done, sequences, strict=True)):
        rows = []
        for seq, tokens in enumerate(sequences):
            left = len(tokens) - done[seq]
            if left:
                size = int(torch.randint(1, most + 1, (1,), generator=generator))
                rows.append((seq, done[seq], min(left, 1 if size <= most // 2 else size)))
        rows.sort(key=lambda row: row[2] != 1)  # a first token alone decodes as well
        logits = decoder.logits(batch_of(rows, sequences, tables, cache.block_size), cache)
        for (seq, first, size), part in zip(rows, logits.split([size for _, _, size in rows]), strict=True):
            done[seq] = first + size
            found[seq].append(part)
    return [torch.cat(parts) for parts in found]


def block_tables(cache, sequences, generator):
    """Returns block tables [S, M] of blocks in random order; block 0, the null block, is in none."""
    most = max(-(-len(tokens) // cache.block_size) for tokens in sequences)
    free = torch.randperm(len(cache.layers[0][0]) - 1, generator=generator) + 1
    return free[: most * len(sequences)].view(len(sequences), most).int()


def batch_of(rows, sequences, tables, block_size, sampled_rows=None):
    """Returns a batch of rows (sequence, tokens in the cache, tokens of this step), decodes first."""
    places = [torch.arange(first, first + size) for _, first, size in rows]
    ends = torch.tensor([first + size for _, first, size in rows], dtype=torch.int32)
    sizes = [size for _, _, size in rows]
    num_decodes = sum(size == 1 for size in sizes)
    return Batch(
        tokens_T=torch.cat([torch.tensor(sequences[s][f : f + n]) for s, f, n in rows]),
        positions_T=torch.cat(places),
        slots_T=torch.cat(
            [
                tables[s, at // block_size].long() * block_size + at % block_size
                for (s, _, _), at in zip(rows, places, strict=True)
            ]
        ),
        block_tables_BM=tables[[s for s, _, _ in rows]],
        chunk_starts=torch.tensor([0, *sizes[num_decodes:]]).cumsum(0).int(),
        context_lens_B=ends,
        sampled_rows_S=sampled_rows,
        num_decodes=num_decodes,
        max_query_len=max(sizes[num_decodes:], default=0),
        max_context_len=int(ends.max()),
    )
