"""The flags and keys of LoRA adapters as settings: slots, their rank, and what stays in host memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from experiments.app.launch_lines.translation import Context, Translation
from policies.adapters.fixed_slots import DEFAULT_RANK, MAX_RANKS

MATRICES = frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
TRTLLM_MODULES = {
    "attn_q": ("q_proj",),
    "attn_k": ("k_proj",),
    "attn_v": ("v_proj",),
    "attn_qkv": FUSED["qkv_proj"],
    "attn_dense": ("o_proj",),
    "mlp_gate": ("up_proj",),
    "mlp_h_to_4h": ("gate_proj",),
    "mlp_4h_to_h": ("down_proj",),
    "mlp_gate_up": FUSED["gate_up_proj"],
}
"""TensorRT-LLM's name of a module -> the matrices that it means."""
TRAFFIC = "requests use adapters with workload=lora only; without it, all go to the base model"
EXPERTS = "kernels for the adapters of routed experts are not modelled"
OVERLAPPED = "loads beside running batches are what is modelled"


def set_lora(
    at: Context, own: Translation, flag: str, *, slots: int, rank: int | None, in_host: int | None
) -> None:
    """Sets the adapter slots of a server. flag: the one that a refusal names.

    rank: of every slot; None: of the adapters. in_host: adapters in host memory; None: all.
    """
    if rank is not None and rank not in MAX_RANKS:
        allowed = ", ".join(map(str, MAX_RANKS))
        own.refused[f"{flag} (rank {rank})"] = f"the ranks of slots that are modelled are {allowed}"
    if in_host is not None and in_host < slots:
        own.refused[f"{flag} (host {in_host})"] = f"host memory must keep the adapters of all {slots} slots"
    if at.has_experts(own.settings):
        own.refused[flag] = EXPERTS
    own.put("adapters", "fixed_slots")
    own.put("adapters.max_loras", slots)
    own.put("adapters.max_lora_rank", rank)
    own.put("adapters.max_cpu_loras", in_host)


def set_lora_of_batches(own: Translation) -> None:
    """Replaces the adapter slots by adapters in every batch, one in each slot: `roofline` has no traffic."""
    if own.settings.pop("adapters", None) is None:
        return
    slots, rank = (own.settings.pop(f"adapters.{key}") for key in ("max_loras", "max_lora_rank"))
    del own.settings["adapters.max_cpu_loras"]
    rank = str(DEFAULT_RANK) if rank == "null" else rank
    own.put("lora", f"{{_target_: hwmodels.model.weights.Lora, rank: {rank}, num_active: {slots}}}")


def judge_modules(own: Translation, flag: str, modules: Iterable[Any]) -> None:
    """Refuses adapters on other matrices than those that are priced: all of attention and dense MLPs."""
    named = [str(module) for module in modules]
    both = FUSED | TRTLLM_MODULES
    found = {matrix for name in named for matrix in both.get(name, (name,))}
    if found == MATRICES or "all" in found or "all-linear" in found:
        own.without_effect[flag] = ""
    else:
        own.refused[f"{flag} {' '.join(named)}"] = (
            "adapters are priced on all of q, k, v, o, gate, up and down, and on nothing else"
        )


def judge_pinned(own: Translation, flag: str, adapters: Iterable[Any]) -> None:
    """Refuses adapters that are pinned, as the traffic has its own names of adapters."""
    for text in adapters:
        try:
            given = json.loads(str(text))
        except (ValueError, RecursionError):
            continue
        if isinstance(given, dict) and given.get("pinned"):
            own.refused[f"{flag} (pinned)"] = "name the traffic's adapters in adapters.pinned beside --from"
