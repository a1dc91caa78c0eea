"""Runs in vLLM's environment: decodes batches with its classes, and hashes the blocks with its functions.

stdin: a JSON list of {payload, token_ids, block_size, lora, salt}, with the payload in hex and the lora null
or [name, path]. stdout: a JSON list.
"""

import json
import sys

import msgspec
from vllm.distributed.kv_events import KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils as utils

utils.init_none_hash(sha256)


def checked(asked):
    """Returns the decoded batch, and vLLM's hashes of the blocks."""
    batch = msgspec.msgpack.decode(bytes.fromhex(asked["payload"]), type=KVEventBatch)
    events = [{"type": type(event).__name__, **msgspec.structs.asdict(event)} for event in batch.events]
    hashes, parent, size = [], None, asked["block_size"]
    for start in range(0, len(asked["token_ids"]) - size + 1, size):
        lora = [("lora", *asked["lora"])] if asked["lora"] else []
        salt = [("cache_salt", asked["salt"])] if asked["salt"] and not start else []
        extra = tuple(lora + salt) or None
        parent = utils.hash_block_tokens(sha256, parent, asked["token_ids"][start : start + size], extra)
        hashes.append(utils.maybe_convert_block_hash(parent))
    return {"ts": batch.ts, "rank": batch.data_parallel_rank, "events": events, "hashes": hashes}


print(json.dumps([checked(each) for each in json.load(sys.stdin)]))
