"""Where KV lives: allocators, prefix reuse, eviction, tiers. One policy a file; `pool` is what all are."""
