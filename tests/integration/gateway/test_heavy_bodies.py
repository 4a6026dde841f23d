"""Bodies at the gateway's bounds, from a caller with a token: none of them holds up a stream beside it.

Counted are the calls that one turn of the event loop makes, which no other work on the machine changes. A thread's are
none of the loop's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.gateway import running_gateway
from factories.servers.http_connection import Connection
from factories.servers.router import backend, running_router
from factories.wire.http_tricks import CHAT, COMPLETIONS, HEAVY_BODIES, heavy_body
from factories.wire.plain_http import PlainHttp
from penstock.gateway.json_body import BodyBounds

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOKEN = "authorization: Bearer right"
BOUNDS = BodyBounds()
# Of one turn: that of a body with as many values as there may be, read once and made into a message; and other work.
MOST_CALLS = 4 * BOUNDS.most_values + (1 << 16)
# Lists and objects of a list, beside those around it; and numbers.
FEW, MANY = BOUNDS.most_containers - 64, BOUNDS.most_values - 64
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
# Route, and fields beside the shortest prompt: as much as one body may have of a kind.
LARGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (CHAT, {"messages": HELLO * FEW}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * FEW}]}),
    "calls": (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL] * (FEW // 2)}]}),
    "tools": (CHAT, {"tools": [TOOL] * (FEW // 3)}),
    "documents": (CHAT, {"documents": [{"text": "a"}] * FEW}),
    "variables": (CHAT, {"chat_template_kwargs": {"a": [1] * MANY}}),
    "stop ids": (CHAT, {"stop_token_ids": list(range(MANY))}),
    "stop texts": (CHAT, {"stop": ["a"] * MANY}),
    "words": (CHAT, {"bad_words_ids": [[1]] * FEW}),
    "biases": (CHAT, {"logit_bias": {str(number): 1 for number in range(MANY // 2)}}),
    "unknown fields": (CHAT, {f"x{number}": 1 for number in range(MANY // 2)}),
    "a schema": (CHAT, {"guided_json": {"enum": list(range(MANY))}}),
    "ids": (COMPLETIONS, {"prompt": [5] * MANY}),
    "items": ("/v1/responses", {"input": [ITEM] * FEW}),
    "blocks": ("/v1/messages", {"messages": [USE] * (FEW // 3)}),
    "tokens": ("/detokenize", {"tokens": [5] * MANY}),
    "metadata": ("/v1/conversations", {"metadata": {str(number): "a" for number in range(MANY // 2)}}),
}


class TurnCalls:
    """Calls of functions that this thread's event loop made in the longest of its turns."""

    def __init__(self) -> None:
        self.most = 0
        self._all = 0

    def note(self, _frame: FrameType, event: str, _about: Any) -> None:
        """Count a call; see sys.setprofile."""
        if event in ("call", "c_call"):
            self._all += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count during the block."""
        run = asyncio.Handle._run

        def counting(handle: asyncio.Handle) -> None:
            before = self._all
            run(handle)
            self.most = max(self.most, self._all - before)

        with mock.patch.object(asyncio.Handle, "_run", counting):
            sys.setprofile(self.note)
            try:
                yield
            finally:
                sys.setprofile(None)


@pytest.mark.parametrize("name", [*(f"trick: {name}" for name in HEAVY_BODIES), *LARGEST])
async def test_no_body_holds_the_loop(name: str, tmp_path: Path) -> None:
    if name in LARGEST:
        path, fields = LARGEST[name]
        body = json.dumps({"messages": HELLO, "max_tokens": 1, "max_output_tokens": 1, **fields}).encode()
    else:
        body = heavy_body(name.removeprefix("trick: "))
        path = COMPLETIONS if "prompts" in name else CHAT
        # An answer has an end.
        body = body[:-1] + b', "max_tokens": 1}' if body.startswith(b'{"') else body
    calls = TurnCalls()
    (tokens := tmp_path / "tokens").write_text("right\n")
    async with (
        backend(script=count_up(1_000_000)) as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address) as gateway,
        PlainHttp(*gateway.host_port) as client,
    ):
        beside = await Connection.to(gateway)
        beside.post(CHAT, {"messages": HELLO, "stream": True}, TOKEN)
        assert await beside.status() == 200
        with calls.counted():
            status, answer = await client.ask("POST", path.encode(), body, TOKEN.encode())
        assert status in (200, 400, 413), answer
        assert gateway.metric("http_requests_in_flight") == 1
        beside.close()
    assert calls.most < MOST_CALLS
