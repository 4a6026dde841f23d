"""Session of GenerationService from the caller's side."""

from __future__ import annotations

from typing import Any

from factories.servers.generation import Client
from penstock.v1 import generation_pb2


class Session:
    """A session from the caller's side."""

    def __init__(self, client: Client) -> None:
        self.call: Any = client.generation.Session()
        self.messages: list[generation_pb2.SessionResponse] = []

    async def submit(self, message: generation_pb2.GenerateRequest, handle: int = 0) -> None:
        await self.call.write(generation_pb2.SessionRequest(submit=message, handle=handle))

    async def abort(self, request_id: str, attempt_epoch: int = 0) -> None:
        abort = generation_pb2.SessionAbort(request_id=request_id, attempt_epoch=attempt_epoch)
        await self.call.write(generation_pb2.SessionRequest(abort=abort))

    async def next(self) -> generation_pb2.SessionResponse:
        message: generation_pb2.SessionResponse = await self.call.read()
        self.messages.append(message)
        return message

    async def rest(self) -> None:
        """Half-close and read to the end."""
        await self.call.done_writing()
        async for message in self.call:
            self.messages.append(message)

    def events(self, request_id: str) -> list[generation_pb2.SessionEvent]:
        return [event for message in self.messages for event in message.events if event.request_id == request_id]

    def kinds(self, request_id: str) -> list[str | None]:
        return [event.WhichOneof("event") for event in self.events(request_id)]

    def ids(self, request_id: str) -> list[int]:
        return [token for event in self.events(request_id) for token in event.delta.token_ids]

    def rows(self, handle: int) -> list[tuple[int, int]]:
        """Return seq and id of every token with the handle `handle`."""
        tokens = [event.tokens for message in self.messages for event in message.events]
        rows = [row for one in tokens for row in zip(one.handles, one.seqs, one.token_ids, strict=True)]
        return [(seq, token_id) for number, seq, token_id in rows if number == handle]
