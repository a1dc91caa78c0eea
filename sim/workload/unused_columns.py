"""Names the columns of a trace that would change a replay and that its format does not use."""

from __future__ import annotations

from collections.abc import Iterable

from sim.workload.trace_files import shown

SUBJECTS: dict[str, tuple[str, ...]] = {
    "images and sound": (
        "image_tokens",
        "num_images",
        "numimages",
        "images",
        "image",
        "audio_tokens",
        "video_tokens",
    ),
    "models and adapters": (
        "model",
        "models",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "adapter",
        "adapter_id",
        "lora",
        "lora_id",
        "lora_name",
    ),
    "priorities": ("priority", "vllm_priority", "strict_priority", "slo_class", "policy_class"),
    "sessions": ("session_id", "conversation_id", "round_index"),
    "tenants": ("tenant", "tenant_id", "user_id"),
    "deadlines": ("deadline_us", "slo_target_us"),
    "delays": ("delay", "delay_ms", "think_time_us", "tool_wait_ms", "tool_call_latency"),
    "hidden tokens": ("reason_ratio", "reasoning_tokens"),
}
"""What a column is about, and the names that it has in public formats, in lower case with underscores."""


def unused_columns(names: Iterable[str], used: Iterable[str]) -> str:
    """Returns a sentence on the columns that matter and are not used; empty if there are none.

    names: those of the file. used: those that the format reads.
    """
    subject_of = {name: subject for subject, known in SUBJECTS.items() for name in known}
    plain = {name: name.strip().lower().replace(" ", "_") for name in names}
    read = set(used)
    found = [
        f"{shown(name)} ({subject_of[key]})"
        for name, key in plain.items()
        if key in subject_of and name not in read
    ]
    if not found:
        return ""
    return f"Columns of the trace that are not used, although they may matter: {', '.join(found)}."
