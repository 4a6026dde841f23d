"""A store of blocks in memory for engines without a model, which works only when a test lets it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Any

from factories.engine.fake_engine import FakeRunner
from penstock.generation.core.block_store import StoredBlock, StoreEvent
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.engine import Engine


class MemoryStore:
    """BlockStore over the fake host pool of a FakeRunner. Orders are carried out in `events`, unless it `is_held`."""

    def __init__(self, kept: dict[bytes, Any] | None = None) -> None:
        """`kept`: contents by key, which a store of another engine may share."""
        self.fingerprint = b"model"
        self.kept: dict[bytes, Any] = {} if kept is None else kept
        self.host: list[Any] = []
        self.is_held = False
        # Keys of contents that are not what was written.
        self.broken: set[bytes] = set()
        self.fetched: list[bytes] = []
        self.num_saved = 0
        self._orders: deque[Callable[[], StoreEvent | None]] = deque()
        # Orders to forget that wait.
        self._changes = 0

    def has(self, key: bytes) -> bool:
        return not self._changes and key in self.kept

    def save(self, number: int, blocks: Items[StoredBlock]) -> None:
        def carry_out() -> StoreEvent:
            for key, block in blocks:
                self.num_saved += key not in self.kept
                self.kept.setdefault(key, list(self.host[block]))
            return StoreEvent(number, (True,) * len(blocks))

        self._orders.append(carry_out)

    def fetch(self, number: int, blocks: Items[StoredBlock]) -> None:
        def carry_out() -> StoreEvent:
            done = []
            for key, block in blocks:
                if False in done:
                    done.append(False)
                    continue
                self.fetched.append(key)
                if key in self.broken:
                    self.kept.pop(key, None)
                    self.host[block] = ["broken"]
                elif key in self.kept:
                    self.host[block] = list(self.kept[key])
                done.append(key in self.kept)
            return StoreEvent(number, tuple(done))

        self._orders.append(carry_out)

    def forget(self, keys: Iterable[bytes]) -> None:
        listed = tuple(keys)
        self._change(lambda: [self.kept.pop(key, None) for key in listed])

    def clear(self) -> None:
        self._change(self.kept.clear)

    def _change(self, call: Callable[[], object]) -> None:
        def carry_out() -> None:
            call()
            self._changes -= 1

        self._changes += 1
        self._orders.append(carry_out)

    def events(self) -> list[StoreEvent]:
        events = []
        while self._orders and not self.is_held:
            event = self._orders.popleft()()
            if event is not None:
                events.append(event)
        return events

    def wait(self, seconds: float) -> None:
        """There is nothing to wait for: the next step takes the events."""


def stored_engine(config: EngineConfig, store: MemoryStore, runner: FakeRunner | None = None) -> Engine:
    """Make an engine with a store."""
    runner = runner or FakeRunner(config)
    store.host = runner.host
    return Engine(config, runner, None, store=store)
