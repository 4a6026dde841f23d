"""A parser of chats that fails ends its own request, and no other of the step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.common.errors import Internal
from penstock.router.chat.chat_output import ChatParser, ChatPiece
from penstock.router.metrics import RouterMetrics
from penstock.router.requests.request_state import RequestSpec, RequestState, Timings
from penstock.router.requests.returned_sequence import Piece, ReturnedSequence
from penstock.v1 import generation_pb2, tokenizer_pb2
from prometheus_client import CollectorRegistry


class BrokenParser(ChatParser):
    """Parser that a text breaks."""

    def feed(self, text: str) -> ChatPiece:
        raise TypeError(f"secret: {text}")


def state_of(request_id: str, make_parser: Callable[[], ChatParser]) -> RequestState:
    request = generation_pb2.GenerateRequest(request_id=request_id)
    options = tokenizer_pb2.DecodeStreamOpen()
    spec = RequestSpec(request_id, request, num_sequences=1, decode_options=options, make_parser=make_parser)
    now = asyncio.get_running_loop().time()
    return RequestState(spec, Timings(now), lambda _: None, RouterMetrics(CollectorRegistry()), 1 << 20)


async def test_a_parser_that_fails_ends_its_own_request() -> None:
    broken = state_of("broken", lambda: BrokenParser(parse_tools=True))
    whole = state_of("whole", lambda: ChatParser(parse_tools=True))
    for state in (broken, whole):
        make: Any = state.spec.make_parser
        sequence = ReturnedSequence(state, 0, make())
        state.sequences[0] = sequence
        state.undecoded = 1
        state.on_text(Piece(sequence, [5], [], None, []), "a word", 1.0)
    assert isinstance(broken.error, Internal)
    assert broken.error.reason == "CHAT_FORMAT"
    assert broken.closed
    assert not whole.closed
    assert "secret" not in str(broken.error)
