"""KV caches: allocators, prefix reuse, eviction, tiers. `pool` has the interface."""
