"""A streamed answer that makes its events from the deltas of one stream, in the turn in which they come."""

from __future__ import annotations

from abc import ABC, abstractmethod

from penstock_client import AsyncStream, Delta

from penstock.gateway.answers import merged


class Followed(ABC):
    """Events of one stream; subclasses make them. A task for each delta would double its cost."""

    def __init__(self, stream: AsyncStream) -> None:
        self.stream = stream

    @abstractmethod
    def begin(self) -> None:
        """Take the facts from the stream's start; called once."""

    @abstractmethod
    def of(self, deltas: list[Delta]) -> bytes:
        """Events of new output; may be empty. The per-token path."""

    @abstractmethod
    async def end(self) -> bytes:
        """The last events of a stream that ended well."""

    async def first(self) -> bytes:
        """Wait for the first events; empty if there is no output at all. Raises PenstockError."""
        piece, begun = b"", False
        while not piece and (deltas := await self.stream.read()):
            if not begun:
                self.begin()
                begun = True
            piece = self.of(merged(deltas))
        if not begun:
            self.begin()
        return piece
