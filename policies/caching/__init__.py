"""KV caches: allocators, prefix reuse, eviction, tiers. One policy per file; `pool` has the interface."""
