"""Pinned prefixes, which clients pay to keep for a time after the last use (prompt caching of APIs).

A pin owns the runs of its prefix like a sequence, so that they are not evicted until pin_s seconds have
passed without a use. All pins together own at most max_blocks blocks; a prefix that does not fit is not
pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from policies.caching.runs import Holding, Run, Runs


class PinnedTime(NamedTuple):
    """For how long the pinned prefixes of a pool were kept.

    expired_token_s: token-seconds of expired pins. kept: tokens, start and expiry of each of the others.
    """

    expired_token_s: float = 0.0
    kept: tuple[tuple[int, float, float], ...] = ()

    def token_s_until(self, end_s: float) -> float:
        """Computes the token-seconds of all pins, up to end_s."""
        return self.expired_token_s + sum(
            num_tokens * (min(end_s, until_s) - since_s) for num_tokens, since_s, until_s in self.kept
        )


class Pin:
    """A prefix that is kept until until_s, even if no sequence uses it."""

    __slots__ = ("held", "number", "since_s", "until_s")

    def __init__(self, number: int, held: Holding, since_s: float) -> None:
        self.number = number  # below 0, so that it differs from request ids
        self.held = held
        self.since_s = since_s
        self.until_s = since_s


class Pins:
    """The pins of a pool, in the order of their last use and thus of their expiry."""

    def __init__(self, *, pin_s: float, max_blocks: int, block_size: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        """Number of pinned blocks."""
        self._pin_s = pin_s
        self._block_size = block_size
        self._pins: OrderedDict[tuple[int, int], Pin] = OrderedDict()  # place, blocks -> pin
        self._num_made = 0
        self._token_s = 0.0  # token-seconds of pins that have expired

    @property
    def runs(self) -> Iterator[Run]:
        """The runs of all pins."""
        return (run for pin in self._pins.values() for run in pin.held.runs)

    @property
    def expires_s(self) -> float:
        """Time at which the next pin expires, in seconds; infinite without pins."""
        return next(iter(self._pins.values())).until_s if self._pins else float("inf")

    def keep(self, runs: Runs, held: Holding, num_blocks: int, now: float) -> bool:
        """Pins the first num_blocks blocks of a sequence or extends their pin; returns false without room."""
        place = next((place for place, end in held.path if end >= num_blocks), -1)
        pin = self._pins.get((place, num_blocks))
        if pin is None:
            if not 0 < num_blocks <= self.max_blocks - self.num_blocks:
                return False
            self._num_made += 1
            number = -self._num_made
            pin = Pin(number, runs.share(held, number, num_blocks), now)
            self._pins[place, num_blocks] = pin
            self.num_blocks += num_blocks
        pin.until_s = now + self._pin_s
        self._pins.move_to_end((place, num_blocks))
        return True

    def pop_expired(self, now: float) -> Pin | None:
        """Removes and returns the next pin if it has expired; else returns None."""
        if self.expires_s > now:
            return None
        _, pin = self._pins.popitem(last=False)
        self.num_blocks -= pin.held.num_with_content
        self._token_s += self._num_tokens(pin) * (pin.until_s - pin.since_s)
        return pin

    def time(self) -> PinnedTime:
        """Returns for how long prefixes were kept so far, and until when they will be."""
        kept = ((self._num_tokens(pin), pin.since_s, pin.until_s) for pin in self._pins.values())
        return PinnedTime(self._token_s, tuple(kept))

    def check_integrity(self) -> None:
        """Asserts that each pin is an owner of its runs."""
        pins = self._pins.values()
        assert all(run.owners[pin.number] is pin.held for pin in pins for run in pin.held.runs)
        assert sum(pin.held.num_with_content for pin in pins) == self.num_blocks <= self.max_blocks

    def _num_tokens(self, pin: Pin) -> int:
        return pin.held.num_with_content * self._block_size
