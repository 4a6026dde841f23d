"""All that a router knows of keys: the ring, their rates and the ledger, behind the questions that a request has."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from penstock.common.acting_for import ACTING_FOR_KEY
from penstock.common.credentials import TokenFile
from penstock.common.errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from penstock.common.needed_scope import NEEDED_SCOPE_KEY
from penstock.router.key_options import KeyOptions
from penstock.router.keys.api_key import ApiKey, KeyScope, scope_missing
from penstock.router.keys.key_account import KeyAccount
from penstock.router.keys.key_metrics import KeyMetrics
from penstock.router.keys.key_rates import KeyRates
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.ledger import Ledger
from penstock.router.keys.ledger_database import open_ledger_database
from penstock.router.keys.ledger_tables import DayUsage
from penstock.router.keys.method_scopes import METHOD_SCOPES

# Seconds for the last entries to be written when the process stops.
_CLOSE_SECONDS = 5.0


class KeyDesk:
    """Keys of one router process. Belongs to one event loop."""

    def __init__(self, options: KeyOptions, registry: CollectorRegistry, others: TokenFile | None = None) -> None:
        """Read the file of keys; `open` opens the ledger. `others`: tokens that are accepted beside keys.

        Raises StartupError naming the flag.
        """
        assert options.keys_file is not None
        self.ring = KeyRing(options.keys_file, options.max_keys)
        self._options, self._others = options, others
        self._metrics = KeyMetrics(registry)
        self._rates: defaultdict[str, KeyRates] = defaultdict(KeyRates)
        self._ledger = Ledger(
            open_ledger_database(options),
            lease_seconds=options.ledger_lease_seconds,
            entry_days=options.ledger_entry_days,
            max_waiting=options.max_ledger_waiting,
        )
        self._metrics.ledger_waiting.set_function(lambda: float(self._ledger.waiting))
        self._look_now = asyncio.Event()

    async def open(self) -> None:
        """Open the ledger. Raises StartupError naming --ledger."""
        await self._ledger.open(self.ring.revoke)

    async def run(self) -> None:
        """Write the ledger, and follow the file, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ledger.run())
            tasks.create_task(self._follow_file())

    async def close(self) -> None:
        """Write the last entries, and close the ledger."""
        await self._ledger.close(_CLOSE_SECONDS)

    def find(self, metadata: Iterable[tuple[str, str | bytes]] | None, method: str = "") -> ApiKey | None:
        """Return the key that a call counts for; None for a token of --auth-token-file.

        `method`: of TextService, where it needs a scope. Raises Unauthenticated for a key that is gone since the call
        began; PermissionDenied and InvalidArgument for a call that is to count for another key, but may not.
        """
        given = dict(metadata or ())
        key = self.ring.find(given.get("authorization"))
        if key is None and not (self._others is not None and self._others.accepts(given.get("authorization"))):
            raise Unauthenticated("a valid key is required", reason="UNAUTHENTICATED")
        digest = given.get(ACTING_FOR_KEY)
        return key if digest is None else self._acted_for(key, digest, method)

    def _acted_for(self, caller: ApiKey | None, shown: str | bytes, method: str) -> ApiKey | None:
        """Return the key for which another token makes a call; its own rights hold. Raises as `find`."""
        try:
            digest = bytes.fromhex(str(shown))
        except ValueError:
            raise InvalidArgument(f"metadata {ACTING_FOR_KEY}", "must be a SHA-256 in hex") from None
        if caller is not None and digest not in caller.digests and KeyScope.DELEGATE not in caller.scopes:
            raise scope_missing((KeyScope.DELEGATE,))
        key = self.ring.with_digest(digest)
        if key is None:
            if self._others is not None and self._others.has_digest(digest):
                return None
            raise PermissionDenied("the key that this call counts for is not in the file any more", reason="KEY_GONE")
        scope = METHOD_SCOPES.get(method)
        if scope is not None and scope not in key.scopes:
            raise scope_missing((scope,), of_owner=True)
        return key

    def begin(self, key: ApiKey, model: str) -> KeyAccount:
        """Make the account of a request."""
        return KeyAccount(
            key, model, self._rates[key.label], self._ledger, self._metrics, self._options.ledger_wait_seconds
        )

    async def usage(self, first_day: int, last_day: int) -> list[DayUsage]:
        """Return the sums of all keys between two days, both included. Raises Unavailable LEDGER_DOWN."""
        return await self._ledger.usage(first_day, last_day)

    @property
    def now(self) -> float:
        """Present time of the ledger, in seconds since 1970."""
        return self._ledger.now

    async def revoke(self, label: str) -> ApiKey:
        """Refuse a key from now on, at all routers that share the ledger. Raises NotFound, Unavailable LEDGER_DOWN."""
        key = next((one for one in self.ring.keys if one.label == label), None)
        if key is None:
            raise NotFound(
                "label: no key of the file has it (`penstock keys list`)", reason="KEY_NOT_FOUND", field="label"
            )
        await self._ledger.revoke(key.digests, label)
        return key

    async def _follow_file(self) -> None:
        loop = asyncio.get_running_loop()
        # Outside of a main thread, as in some tests, there are no signals.
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGHUP, self._look_now.set)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._options.keys_interval_seconds):
                        await self._look_now.wait()
                self._look_now.clear()
                if await asyncio.to_thread(self.ring.refresh):
                    self._forget_gone(self.ring.keys)
        finally:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(signal.SIGHUP)

    def _forget_gone(self, keys: Sequence[ApiKey]) -> None:
        """Forget the rates of keys that are gone, except while requests of theirs run."""
        labels = {key.label for key in keys}
        for label in [label for label, rates in self._rates.items() if label not in labels and not rates.running]:
            del self._rates[label]


def require_model(key: ApiKey, model: str, adapter: str = "") -> None:
    """Refuse a model, or an adapter, that a key may not name. Raises PermissionDenied."""
    if not key.may_use(model, adapter):
        field = "adapter" if adapter and key.may_use(model) else "model"
        raise PermissionDenied(f"{field}: this key may not use it", reason="MODEL_NOT_ALLOWED", field=field)


def require_scope(key: ApiKey, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Refuse a call that asks for a scope which its key lacks. Raises PermissionDenied, InvalidArgument."""
    needed = dict(metadata or ()).get(NEEDED_SCOPE_KEY)
    if needed is None:
        return
    if needed not in tuple(KeyScope):
        raise InvalidArgument(f"metadata {NEEDED_SCOPE_KEY}", f"must be one of {', '.join(KeyScope)}")
    if needed not in key.scopes:
        raise scope_missing((KeyScope(str(needed)),))
