"""Memory of past outputs, tenant by tenant, where later requests find drafts.

A tenant's outputs are a ring of tokens with hash chains over its 2-grams, as zlib searches its window: the last place
of every 2-gram, and for every place the previous place of the same 2-gram. So the memory has a fixed size, a token is
added in constant time, and a search looks at a bounded number of places, the newest first. Hashes only lead to places;
the tokens themselves are compared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from penstock.generation.engine.config import EngineConfig

# Separates two runs. No vocabulary is that large.
_SEPARATOR = (1 << 32) - 1
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
# Most places of a search, and the length in tokens from which a match is long enough.
_MOST_PLACES, _LONGEST_MATCH = 16, 16


class TenantMemory:
    """Past outputs of one tenant (core.request.PastOutputs). Used by the engine's thread only."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: tokens that are kept. Each takes 20 to 28 bytes."""
        self._capacity = capacity
        self._tokens = array("I", bytes(4 * capacity))
        # Place % capacity -> 1 + the earlier place with the same hash of its 2-gram; 0: none.
        self._earlier = array("Q", bytes(8 * capacity))
        bits = max(capacity - 1, 1).bit_length()
        self._shift = 64 - bits
        # Hash of a 2-gram -> 1 + its last place, that of its second token; 0: none.
        self._last = array("Q", bytes(8 << bits))
        # Number of tokens ever added: the next place.
        self._end = 0

    @property
    def num_tokens(self) -> int:
        """Number of kept tokens, including those between runs."""
        return min(self._end, self._capacity)

    def add(self, token_ids: Seq[int]) -> None:
        """The memory keeps the end of a run that is longer than itself."""
        if len(token_ids) < 2:
            return
        tokens, capacity, earlier, last, shift = self._tokens, self._capacity, self._earlier, self._last, self._shift
        place, before = self._end, _SEPARATOR
        tokens[place % capacity] = _SEPARATOR
        earlier[place % capacity] = 0
        for token_id in token_ids[-(capacity - 1) :]:
            place += 1
            tokens[place % capacity] = token_id
            slot = _slot(before, token_id, shift)
            earlier[place % capacity] = last[slot]
            last[slot] = place + 1
            before = token_id
        self._end = place + 1

    def continuation(self, token_ids: Seq[int], *, fewest: int, max_tokens: int) -> list[int]:
        """The tokens after the longest match; of equally long matches the newest.

        At most twice as many tokens as match are returned: a short match says little about distant tokens.
        """
        if len(token_ids) < max(fewest, 2):
            return []
        capacity, tokens = self._capacity, self._tokens
        oldest = max(self._end - capacity, 0)
        longest, found = max(fewest, 2) - 1, -1
        place = self._last[_slot(token_ids[-2], token_ids[-1], self._shift)] - 1
        for _ in range(_MOST_PLACES):
            if place <= oldest:
                break
            length = self._match(place, token_ids, oldest)
            # No draft follows a run's last token.
            if length > longest and place + 1 < self._end and tokens[(place + 1) % capacity] != _SEPARATOR:
                longest, found = length, place
                if length >= _LONGEST_MATCH:
                    break
            place = self._earlier[place % capacity] - 1
        if found < 0:
            return []
        drafts: list[int] = []
        for follower in range(found + 1, min(found + 1 + min(max_tokens, 2 * longest), self._end)):
            token_id = tokens[follower % capacity]
            if token_id == _SEPARATOR:
                break
            drafts.append(token_id)
        return drafts

    def _match(self, place: int, token_ids: Seq[int], oldest: int) -> int:
        """Return the number of tokens up to `place` that equal the last ones of `token_ids`."""
        capacity, tokens, most = self._capacity, self._tokens, min(len(token_ids), _LONGEST_MATCH, place - oldest + 1)
        for length in range(most):
            if tokens[(place - length) % capacity] != token_ids[-1 - length]:
                return length
        return most


class NgramMemory:
    """Memories of tenants; the least recently used are dropped. Used by the engine's thread only."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self._capacity = config.ngram_memory_tokens
        self._most_tenants = config.ngram_memory_tenants
        self._seconds = config.ngram_memory_seconds
        self._clock = clock
        # Tenant -> its memory and the time of its last use, the least recent first.
        self._tenants: OrderedDict[Hashable, tuple[TenantMemory, float]] = OrderedDict()

    @property
    def num_tenants(self) -> int:
        """Number of tenants with kept outputs."""
        return len(self._tenants)

    @property
    def num_tokens(self) -> int:
        """Number of kept tokens of all tenants. O(tenants)."""
        return sum(memory.num_tokens for memory, _ in self._tenants.values())

    def of(self, tenant: Hashable) -> TenantMemory | None:
        """Return the memory of a tenant, new if there is none. None: this engine remembers nothing.

        A caller may go on using it after it was dropped.
        """
        if not self._most_tenants:
            return None
        now = self._clock()
        self._forget_until(now - self._seconds)
        memory, _ = self._tenants.pop(tenant, (None, now))
        if memory is None:
            memory = TenantMemory(self._capacity)
            while len(self._tenants) >= self._most_tenants:
                self._tenants.popitem(last=False)
        self._tenants[tenant] = memory, now
        return memory

    def clear(self) -> None:
        """Forget all tenants."""
        self._tenants.clear()

    def _forget_until(self, time: float) -> None:
        """Forget tenants with a last use before `time`."""
        while self._tenants and next(iter(self._tenants.values()))[1] < time:
            self._tenants.popitem(last=False)


def _slot(first: int, second: int, shift: int) -> int:
    return ((((first << 32) | second) * _MIX) & _MASK) >> shift
