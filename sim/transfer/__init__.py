"""Moves KV between replicas: network, links, prefill-to-decode transfer and replication."""
