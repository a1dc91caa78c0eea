"""The rules that differ between the schedulers that `EngineCore` follows (vLLM's and SGLang's), as values.

Sources: `vllm/v1/core/sched/scheduler.py` and `vllm/v1/core/kv_cache_utils.py` of the wheels 0.32.0 and
0.33.0; `sglang/srt/managers/scheduler.py` and `sglang/srt/managers/schedule_batch.py` of the wheel 0.5.23.
"""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    """The rules of one release. The default is vLLM 0.32, whose rules apply to other engines as well."""

    hashes_ahead: bool = False
    """With EAGLE and MTP, whether the content of a KV block includes the tokens after it that drafting reads.
    If not, the last block of a prefix-cache hit is computed again, except in engines that send or load KV.
    """
    caches_verified: bool = False
    """Whether accepted draft tokens enter the prefix cache once verified, instead of with the next step."""
    serves_past_preempted: bool = False
    """With scheduling=priority, whether the running requests after one that preempted itself are still
    served.
    """
    skips_unfit: bool = False
    """Whether a waiting prompt of which no chunk fits the budget is skipped; if not, the prompts behind it
    wait.

    A chunk may not end within the tokens that the modules of MTP read ahead.
    """
    paces_alone: bool = False
    """Whether prefill_schedule_interval counts from this engine's last step with prompts."""
    caches_when_read: bool = False
    """Whether prompts and outputs enter the prefix cache when their step's tokens are read.

    With `Ends.one_step_late` that is one step later than in vLLM: a complete prompt enters the cache after
    the next plan, and so does the KV of a stop token, which the next step has computed. If a request ends
    with its first token, its prompt enters the cache only with the output
    (`process_batch_result_prefill` and `Req.owned_kv_len` of SGLang).
    """
    discards_unread: bool = False
    """Whether a preempted sequence loses the token that was unread at its preemption.

    It computes that token again (`is_retracted` in SGLang's `process_batch_result_decode`).
    """

    def under(self, *, has_classes: bool, speculates: bool) -> Release:
        """Returns the rules with a scheduling policy. has_classes: whether it has priority classes.

        speculates: whether a step yields several tokens per sequence; then unread ones are kept.
        """
        return self._replace(
            serves_past_preempted=self.serves_past_preempted and has_classes,
            discards_unread=self.discards_unread and not speculates,
        )


VLLM_0_32 = Release()
SGLANG_0_5 = Release(caches_when_read=True, discards_unread=True)
"""SGLang 0.5.23. Both rules concern its overlapped loop only (`event_loop_overlap`)."""

RELEASES = {
    (0, 32): VLLM_0_32,
    (0, 33): Release(
        hashes_ahead=True,
        caches_verified=True,
        serves_past_preempted=True,
        skips_unfit=True,
        paces_alone=True,
    ),
}
"""Releases in which rules changed, oldest first. Older releases use the rules of the first."""


def release_of(version: str | None) -> Release:
    """Returns the rules of a version, such as 0.32.0; None: the newest release."""
    if version is None:
        return RELEASES[max(RELEASES)]
    number = tuple(int(part) for part in version.split(".")[:2])
    return RELEASES[max((known for known in RELEASES if known <= number), default=min(RELEASES))]
