"""Gateway in this process before a router whose model writes what a test says, asked over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from factories.servers.emitting_backend import EmittingBackend
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import Router, backend, running_router
from factories.servers.served import Served


@dataclass
class ScriptedGateway:
    """A running one."""

    backend: EmittingBackend
    router: Router
    gateway: Gateway
    served: Served
    ids: list[int] = field(default_factory=list)

    async def writes(self, text: str) -> Sequence[int]:
        """Let the model write `text` from now on, control tokens parsed; return its ids."""
        self.ids = await self.router.encode(text)
        self.backend.script = lambda _: self.ids
        return self.ids

    async def prompt(self) -> str:
        """The last prompt that the model got, control tokens spelled out."""
        ids = list(self.backend.submitted[-1].prompt_token_ids)
        return await self.router.decode(ids, skip_special_tokens=False)

    async def ask(self, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request: POST where it has a body."""
        return await asyncio.to_thread(self.served.ask, path, body)

    async def json(self, path: str, body: Any = None) -> Any:
        """The answer's object; the request must succeed."""
        return await asyncio.to_thread(self.served.json, path, body)

    async def events(self, path: str, body: Any) -> list[Any]:
        """Objects of a stream that ends in [DONE]."""
        return await asyncio.to_thread(self.served.events, path, body)


@asynccontextmanager
async def scripted_gateway(
    text: str = "", *, tokenizer: tuple[str, str] = ("", ""), aliases: Sequence[str] = (), **settings: Any
) -> AsyncIterator[ScriptedGateway]:
    """Run one whose model writes `text` and has these further names. Settings are the gateway's. `tokenizer`: address
    and fingerprint of another than the shared one."""
    address, fingerprint = tokenizer
    async with (
        backend(aliases=aliases, **({"fingerprint": fingerprint, "vocab_size": 0} if fingerprint else {})) as one,
        running_router(one, tokenizer=address, fingerprint=fingerprint) as router,
        running_gateway(router.server.address, **settings) as gateway,
    ):
        served = Served(gateway.app.addresses.grpc, router.server.address)
        found = ScriptedGateway(one, router, gateway, served)
        if text:
            await found.writes(text)
        yield found
