"""The part of an engine that moves KV and adapters: between memory tiers, and from engine to engine."""

from __future__ import annotations

from policies.core.engine_base import EngineBase
from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import AdapterLoad, Migrant, Transfer
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence


class TransferringEngine(EngineBase):
    """Adds to `EngineBase` the loads and stores of KV, the loads of adapters, and the moves of sequences.

    The arguments are those of `EngineCore`, which adds the loop.
    """

    def take_transfers(self) -> list[Transfer]:
        """Returns the transfers that plans have requested since the last call, in order.

        The caller runs them. The stores of the last plan must be read before the plan is run, because it
        reuses their blocks. See `Transfer`.
        """
        return self.transfers.take()

    def take_adapter_loads(self) -> list[AdapterLoad]:
        """Returns the adapter loads that plans have requested since the last call, in order.

        The caller runs them after every plan, and calls `adapter_loaded` at the end of each.
        """
        return [] if self.residents is None else self.residents.take_loads()

    def loaded(self, request_id: int) -> None:
        """Records a finished transfer that a sequence waits for; after the last one the sequence continues.

        Does nothing if the sequence was aborted meanwhile. While a plan is in flight, this takes effect with
        its commit.
        """
        if self._in_flight is not None:
            self._loaded_in_flight.append(request_id)
            return
        seq = self.loading.get(request_id)
        if seq is not None:
            self._note_load(seq)

    def adapter_loaded(self, name: str) -> None:
        """Records that an adapter is on the GPU; sequences that waited only for it continue.

        While a plan is in flight, this takes effect with its commit.
        """
        if self._in_flight is not None:
            self._adapters_in_flight.append(name)
            return
        assert self.residents is not None
        for seq in self.residents.loaded(name):
            self._note_load(seq)

    def _note_load(self, seq: Sequence) -> None:
        if self.transfers.is_loaded(seq):
            self.running_set.finish_loading(seq)
            self._arrived.append(seq)

    def _take_loaded(self) -> None:
        """Applies the loads that were reported while a plan was in flight."""
        loaded, self._loaded_in_flight = self._loaded_in_flight, []
        for request_id in loaded:
            self.loaded(request_id)
        adapters, self._adapters_in_flight = self._adapters_in_flight, []
        for name in adapters:
            self.adapter_loaded(name)

    def export(self, request_id: int) -> Migrant | None:
        """Exports a running sequence to another engine and ends it here; None if it has no KV to copy.

        Must be called between commit and plan. The blocks of the sequence are free at once: the caller must
        copy them before the next step and its transfers. Blocks are named as in `Transfer`.
        """
        self._check_at_rest("export")
        migrant = self._state.migrant(request_id)
        if migrant is not None:
            self._state.finish(self.running[request_id], FinishReason.migrated)
        return migrant

    def begin_kv_transfer(self, request_id: int) -> Migrant | None:
        """Exports a sequence that keeps slot and blocks, in state leaving, until its KV has been copied.

        Only for a sequence that decodes or is paused; None otherwise. `abort(request_id,
        FinishReason.migrated)` ends it here when the copy is complete; `cancel_kv_transfer` lets it continue
        to decode here.
        """
        self._check_at_rest("begin_kv_transfer")
        migrant = None if request_id in self.prefilling else self._state.migrant(request_id)
        if migrant is not None:
            self.running_set.begin_kv_transfer(self.running[request_id])
        return migrant

    def cancel_kv_transfer(self, request_id: int) -> None:
        """Lets a leaving sequence continue to decode here. Raises KeyError if it is not leaving."""
        self._check_at_rest("cancel_kv_transfer")
        self.running_set.cancel_kv_transfer(self.leaving[request_id])

    def check_migrant(self, request: Request, num_known: int, stop_after: StopAfter = None) -> None:
        """Raises RejectedError if a sequence of num_known known tokens cannot continue here."""
        self._state.limits.check_resident(num_known)
        end_known, _, _ = self.bounds_of(request, stop_after)
        if num_known >= end_known:
            raise RejectedError(f"a sequence of {num_known} tokens: it would have ended at {end_known} here")

    def adopt(self, migrant: Migrant, stop_after: StopAfter = None, tier: str = "remote") -> Sequence:
        """Adds a sequence that another engine has exported; it waits for a slot and then for its KV.

        KV that the cache has here is not transferred; if the cache has all of it, there is no transfer. With
        tier="live" the cache is not asked, as the other engine decodes on: see policies/core/live_load.py.
        Tokens that the migrant has not computed are computed here. stop_after: as for `add`, counted from its
        first output token. tier: the location of its KV, see `Transfer`. Raises RejectedError if it can never
        be served.
        """
        self.check_migrant(migrant.request, migrant.num_known, stop_after)
        seq = self.add(migrant.request, stop_after)
        seq.stored_known = migrant.num_known
        if migrant.num_computed:
            seq.num_swapped = migrant.num_computed
            seq.swap_tier = tier
        return seq
