"""Stores of what a gateway keeps for callers between their requests, opened from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversation_store import ConversationBounds, ConversationStore
from penstock.gateway.life_signs import LifeSigns, NoLifeSigns, RedisLifeSigns
from penstock.gateway.redis_conversations import RedisConversations
from penstock.gateway.redis_place import is_shared
from penstock.gateway.redis_responses import RedisResponses
from penstock.gateway.response_store import ResponseStore
from penstock.gateway.sqlite_conversations import SqliteConversations
from penstock.gateway.sqlite_responses import SqliteResponses


@dataclass(frozen=True, slots=True)
class KeptStores:
    """Stores at one place; the place closes with `responses`."""

    responses: ResponseStore
    conversations: ConversationStore
    signs: LifeSigns

    async def open(self) -> None:
        """Connect. Raises StartupError if no later try can succeed."""
        await self.responses.open()
        await self.conversations.open()


def open_stores(config: GatewayConfig) -> KeptStores | None:
    """Return the stores of `--response-store`; None if it is off. Raises StartupError naming it."""
    if config.response_store == "off":
        return None
    bounds: Any = {
        "max_responses": config.max_responses,
        "max_bytes": config.max_response_bytes,
        "seconds": config.response_seconds,
    }
    of_conversations = ConversationBounds(
        config.max_conversations,
        config.max_conversation_bytes,
        config.max_body_bytes,
        config.conversations_share,
        config.conversation_seconds,
    )
    if not is_shared(config.response_store):
        rows = SqliteResponses(config.response_store, **bounds)
        return KeptStores(rows, SqliteConversations(rows.place, of_conversations), NoLifeSigns())
    keys = RedisResponses(
        config.response_store,
        **bounds,
        timeout_seconds=config.response_store_seconds,
        connections=config.response_store_connections,
    )
    signs = RedisLifeSigns(keys.place, config.background_sign_seconds)
    return KeptStores(keys, RedisConversations(keys.place, of_conversations), signs)
