"""Protocols of the client of benchmarks/wire.py: Penstock's Chat, or the chat completions of an HTTP gateway.

Streams of one HTTP/2 connection, or an HTTP/1.1 connection each, read by the same few lines and without parsing more
than the text needs.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod

from penstock.v1 import config_pb2, text_pb2, tokenizer_pb2

from benchmarks._http2 import Connection

MODEL = "penstock-demo"
# The first byte of a ChatResponse says which event it holds.
_DELTA, _FINISHED = 0x12, 0x1A
_CONTENT, _REASON = b'"delta":{"content":"', b'"finish_reason":"'


def _question(slot: int) -> str:
    return f"Tell me about Penstock, number {slot}."


class Protocol(ABC):
    """Requests and answers of a chat."""

    path: str
    connection: type[Connection]
    # Number of chats that a connection carries at once.
    max_streams = 4096

    @abstractmethod
    def request(self, slot: int) -> bytes:
        """Return the body of a chat with the seed `slot`."""

    @abstractmethod
    def text(self, message: bytes) -> str | None:
        """The text of a delta; None if the message is none."""

    @abstractmethod
    def is_end(self, message: bytes) -> bool:
        """True when a message that is no delta says that the answer is whole."""


class Grpc(Protocol):
    """TextService.Chat."""

    path = "/penstock.v1.TextService/Chat"
    connection = Connection

    def request(self, slot: int) -> bytes:
        prompt = tokenizer_pb2.Message(role="user", content=_question(slot))
        request = text_pb2.ChatRequest(messages=[prompt], config=config_pb2.GenerationConfig(seed=slot))
        return request.SerializeToString()

    def text(self, message: bytes) -> str | None:
        return text_pb2.ChatResponse.FromString(message).delta.text if message[0] == _DELTA else None

    def is_end(self, message: bytes) -> bool:
        return message[0] == _FINISHED


class Events(Connection):
    """`on_message` for each server-sent event, without the empty line after it."""

    content_type = "application/json"

    def _body(self, message: bytes) -> bytes:
        return message

    def _take_data(self, stream: int, payload: bytes) -> None:
        *events, rest = (self._partial.pop(stream, b"") + payload).split(b"\n\n")
        for event in events:
            self._on_message(stream, event)
        if rest:
            self._partial[stream] = rest


class Sse(Protocol):
    """/v1/chat/completions with `stream`, as smg answers it."""

    path = "/v1/chat/completions"
    connection = Events
    # smg refuses the 201st, and counts one that has just ended for a moment more.
    max_streams = 128

    def request(self, slot: int) -> bytes:
        messages = [{"role": "user", "content": _question(slot)}]
        return json.dumps({"model": MODEL, "stream": True, "seed": slot, "messages": messages}).encode()

    def text(self, message: bytes) -> str | None:
        begin = message.find(_CONTENT) + len(_CONTENT)
        if begin < len(_CONTENT):
            return None
        text = message[begin : message.find(b'"', begin)]
        if b"\\" in text:
            return str(json.loads(message.removeprefix(b"data: "))["choices"][0]["delta"]["content"])
        return text.decode()

    def is_end(self, message: bytes) -> bool:
        return _REASON in message


class PlainEvents(Connection):
    """Server-sent events on an HTTP/1.1 connection, one request after the other; it trusts its peer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # Bytes of an event that has not come whole; None before the end of an answer's head.
        self._event: bytes | None = None
        self.settled.set_result(None)

    def request(self, path: str, message: bytes) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 1
        assert self._transport is not None
        head = f"POST {path} HTTP/1.1\r\nhost: {self._authority}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(message)}\r\n\r\n".encode() + message)
        return stream

    def data_received(self, data: bytes) -> None:
        data, stream = self._received + data if self._received else data, self._next_stream - 1
        if self._event is None:
            head, end, data = data.partition(b"\r\n\r\n")
            if not end:
                self._received = head
                return
            if b" 200 " not in head[:16]:
                raise ConnectionError(head.decode(errors="replace") + data.decode(errors="replace"))
            self._event = b""
        at = 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size, begin = int(data[at:line], 16), line + 2
            if begin + size + 2 > len(data):
                break
            at = begin + size + 2
            if not size:
                self._received, self._event = data[at:], None
                self._on_end(stream)
                return
            *events, self._event = (self._event + data[begin : begin + size]).split(b"\n\n")
            for event in events:
                self._on_message(stream, event)
        self._received = data[at:]


class PlainSse(Sse):
    """The same over HTTP/1.1, as Penstock's gateway and most clients speak it."""

    connection = PlainEvents
    max_streams = 1


PROTOCOLS: dict[str, Protocol] = {"grpc": Grpc(), "sse": Sse(), "sse1": PlainSse()}
