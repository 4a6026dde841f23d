"""Keys and their use as messages for operators."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.router.keys.api_key import ApiKey
from penstock.router.keys.key_ring import KeyRing
from penstock.router.keys.ledger_tables import DayUsage
from penstock.v1 import router_pb2


def keys_facts(keys: Iterable[ApiKey], usage: Iterable[DayUsage], ring: KeyRing) -> list[router_pb2.KeyFacts]:
    """Make the messages of keys. `usage`: days of all keys. A year of many keys takes long: not for a loop."""
    days: dict[str, list[DayUsage]] = {}
    for day in usage:
        days.setdefault(day.label, []).append(day)
    return [_key_facts(key, days.get(key.label, ()), is_revoked=ring.is_revoked(key)) for key in keys]


def _key_facts(key: ApiKey, usage: Iterable[DayUsage], *, is_revoked: bool) -> router_pb2.KeyFacts:
    """Make the message of a key, without its secret. `usage`: the key's own days."""
    quotas = key.quotas
    return router_pb2.KeyFacts(
        label=key.label,
        tenant=key.tenant,
        scopes=sorted(key.scopes),
        models=sorted(key.models or ()),
        all_models=key.models is None,
        adapters=sorted(key.adapters or ()),
        all_adapters=key.adapters is None,
        requests_per_minute=quotas.requests_per_minute,
        tokens_per_minute=quotas.tokens_per_minute,
        concurrent_requests=quotas.concurrent_requests,
        tokens_per_day=quotas.tokens_per_day,
        expires=key.expires,
        revoked=is_revoked,
        usage=[
            router_pb2.KeyUsage(
                day=day.day,
                answers=day.answers,
                prompt_tokens=day.prompt_tokens,
                completion_tokens=day.completion_tokens,
                reserved_tokens=day.reserved,
                lost_answers=day.lost_answers,
                lost_tokens=day.lost_tokens,
            )
            for day in usage
        ],
    )
