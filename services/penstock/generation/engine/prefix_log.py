"""Log of the prefixes that an engine's pools keep: routers learn from it what they need not guess."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.common.block_hashes import short_name

if TYPE_CHECKING:
    from penstock.generation.engine.block_pool import BlockPool

# Changes that are kept for readers; one that is farther behind begins anew.
_MOST_LOGGED = 1 << 15
# Most names of one report: 8 bytes each.
MOST_TOLD = 4096


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """News for one reader: names of blocks that are found from now on, and of those that are not any more.

    `begins_anew`: nothing that was told before counts.
    """

    begins_anew: bool
    kept: tuple[int, ...]
    gone: tuple[int, ...]


class PrefixLog:
    """Names of the blocks that can be found in one of the pools, and the last changes.

    The engine's thread changes it, once a block; readers on other threads take what is new to them. A block that
    several groups of layers or both pools keep has one name.
    """

    def __init__(self, pools: Iterable[BlockPool], most_logged: int = _MOST_LOGGED) -> None:
        self._lock = threading.Lock()
        # Number of keepers of each name.
        self._keepers: dict[int, int] = {}
        # The last changes, oldest first: names, and whether each is kept (1) or gone (0); number of the first of them.
        self._names, self._are_kept = array("Q"), bytearray()
        self._begin = 0
        self._most_logged = most_logged
        for pool in pools:
            pool.on_register.append(self._registered)
            pool.on_forget.append(self._forgotten)

    def __len__(self) -> int:
        """Number of names that are kept."""
        return len(self._keepers)

    @property
    def end(self) -> int:
        """Number of the next change."""
        return self._begin + len(self._names)

    def all(self) -> tuple[array[int], int]:
        """Return the names that are kept now, and the number of the next change. Thread-safe; O(names)."""
        with self._lock:
            return array("Q", self._keepers), self.end

    def after(self, number: int, most: int) -> tuple[array[int], bytearray] | None:
        """Return at most `most` changes from a number on: names, and 1 for each that is kept. None: it is too old.

        Thread-safe; O(most).
        """
        with self._lock:
            first = number - self._begin
            return None if first < 0 else (self._names[first : first + most], self._are_kept[first : first + most])

    def _registered(self, block_hash: bytes) -> None:
        name = short_name(block_hash)
        with self._lock:
            keepers = self._keepers.get(name, 0)
            self._keepers[name] = keepers + 1
            if not keepers:
                self._log(name, 1)

    def _forgotten(self, block_hash: bytes) -> None:
        name = short_name(block_hash)
        with self._lock:
            keepers = self._keepers.pop(name) - 1
            if keepers:
                self._keepers[name] = keepers
            else:
                self._log(name, 0)

    def _log(self, name: int, is_kept: int) -> None:
        """Append a change. The lock is held."""
        self._names.append(name)
        self._are_kept.append(is_kept)
        # Half at a time: to drop one costs as much.
        if len(self._names) > self._most_logged:
            dropped = len(self._names) - self._most_logged // 2
            del self._names[:dropped], self._are_kept[:dropped]
            self._begin += dropped


class PrefixReader:
    """One reader's place in a log. Its first reports have all names; `take` is for one thread."""

    def __init__(self, log: PrefixLog, most: int = MOST_TOLD) -> None:
        """`most`: names of one report."""
        self._log = log
        self._most = most
        # Names that are still to be told before the changes from `_number` on; None: nothing is told yet.
        self._rest: array[int] | None = None
        self._number = 0

    @property
    def has_more(self) -> bool:
        """True while another `take` would tell something."""
        return bool(self._rest) or self._number != self._log.end

    def take(self) -> PrefixReport | None:
        """Return the next report; None: there is nothing to tell."""
        changes = None if self._rest is None else self._log.after(self._number, self._most)
        begins_anew = changes is None
        if changes is None:
            self._rest, self._number = self._log.all()
        if self._rest or begins_anew:
            assert self._rest is not None
            told = self._rest[-self._most :]
            del self._rest[-self._most :]
            return PrefixReport(begins_anew, tuple(told), ())
        assert changes is not None
        names, are_kept = changes
        self._number += len(names)
        # Of one that came and went the last change counts.
        last = dict(zip(names, are_kept, strict=True))
        if not last:
            return None
        kept = tuple(name for name, is_kept in last.items() if is_kept)
        return PrefixReport(False, kept, tuple(name for name, is_kept in last.items() if not is_kept))
