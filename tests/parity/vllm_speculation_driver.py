"""vLLM's own scheduler with speculation, without a model: it is handed scripted draft tokens and acceptances.

Every `SpeculativeConfig` is built by vLLM's constructor from the config.json of a tiny draft model, and so
checked and completed as for a user. Two things are patched: `suffix` is an ngram config with another method,
because its constructor wants a package of the proposer, and num_speculative_tokens_per_batch_size is set on a
copy of a finished config.
"""

from __future__ import annotations

import json
from copy import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from tests.parity.lockstep import Settings
from tests.parity.vllm_driver import TINY_LLAMA, Launch, VllmEngine, model_config

TINY_DEEPSEEK = TINY_LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
WRONG_TOKEN = 2
"""A draft token; only the number of the accepted ones matters to the scheduler."""


class VllmSpeculativeEngine(VllmEngine):
    """vLLM's `Scheduler` or `AsyncScheduler` with speculation.

    The synchronous one is given draft tokens after each step, as by vLLM's engine core. The asynchronous one
    puts placeholders in their place itself. The rows of a padded request, which has just been admitted, hold
    no draft tokens, and none of them is accepted.
    """

    def __init__(self, settings: Settings) -> None:
        self._speculation = settings.speculation
        super().__init__(settings)

    def _speculative_config(self, settings: Settings) -> SpeculativeConfig:
        speculation = self._speculation
        shared = _shared_config(
            speculation.method, speculation.num_speculative_tokens, speculation.num_modules
        )
        config = copy(shared)
        if speculation.by_batch_size is not None:
            config.num_speculative_tokens_per_batch_size = list(speculation.by_batch_size)
        return config

    def _drafts(self, plan: SchedulerOutput) -> dict[int, int]:
        return {int(name): len(drafts) for name, drafts in plan.scheduled_spec_decode_tokens.items()}

    def _tokens(self, request: Request, plan: SchedulerOutput) -> list[int]:
        drafts = plan.scheduled_spec_decode_tokens.get(request.request_id, [])
        resumed = plan.scheduled_cached_reqs.resumed_req_ids
        is_padding = request.request_id in (resumed | {new.req_id for new in plan.scheduled_new_reqs})
        num_accepted = self._speculation.num_accepted(
            int(request.request_id), request.num_output_tokens, 0 if is_padding else len(drafts)
        )
        return [self._token(request, place) for place in range(num_accepted + 1)]

    def _read(self, launch: Launch) -> dict[int, str]:
        finished = super()._read(launch)
        if launch.samples and not self._is_async:
            self._propose(launch)
        return finished

    def _propose(self, launch: Launch) -> None:
        """Hands the scheduler the draft tokens for the requests of a step, as `EngineCore.post_step` does."""
        num_asked = launch.plan.num_spec_tokens_to_schedule
        names, drafts = [], []
        for name in launch.samples:
            request = self.scheduler.requests.get(name)
            if request is not None:
                num_found = self._speculation.num_found(int(name), request.num_output_tokens, num_asked)
                names.append(name)
                drafts.append([WRONG_TOKEN] * num_found)
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


@cache
def _shared_config(method: str, num_speculative_tokens: int, num_modules: int) -> SpeculativeConfig:
    """Returns vLLM's configuration of a method; it must be copied before it is changed."""
    draft_models = {
        "medusa": {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": 64},
        "draft_model": TINY_LLAMA,
        "eagle": TINY_LLAMA | {"architectures": ["EagleLlamaForCausalLM"]},
        "eagle3": TINY_LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512},
        "mtp": TINY_DEEPSEEK | {"num_nextn_predict_layers": num_modules},
    }
    with TemporaryDirectory() as folder:
        if method in draft_models:
            (Path(folder) / "config.json").write_text(json.dumps(draft_models[method]))
        config = SpeculativeConfig(
            method="ngram" if method == "suffix" else method,
            model=folder if method in draft_models else None,
            num_speculative_tokens=num_speculative_tokens,
            target_model_config=model_config(),
            target_parallel_config=ParallelConfig(),
        )
    if method == "suffix":
        config.method = method
    return config
