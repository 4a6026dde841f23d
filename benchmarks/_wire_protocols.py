"""Protocols of the client of benchmarks/wire.py: Penstock's Chat, or the chat completions of an HTTP gateway.

Both are streams of one HTTP/2 connection, read by the same few lines and without parsing more than the text needs.
"""

from __future__ import annotations

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


PROTOCOLS: dict[str, Protocol] = {"grpc": Grpc(), "sse": Sse()}
