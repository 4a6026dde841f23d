"""Messages of the peers of benchmarks/wire.py: server-sent events, and a worker's messages for smg."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from penstock.http2 import frames

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks._wire_client import problem
from benchmarks._wire_pace import Pace
from benchmarks._wire_proto import block, fields, number, packed, varint
from benchmarks._wire_protocols import Events, Sse
from benchmarks._wire_report import markdown, plot
from benchmarks._wire_smg_worker import TokenSource, answer, parse_request


def event(delta: dict[str, Any], reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    return (
        b"data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}, separators=(",", ":")).encode()
    )


@pytest.mark.parametrize("text", ["tion", " the", 'a"b\\c', "\n\t", "käse"])
def test_the_text_of_an_event_is_its_content(text: str) -> None:
    assert Sse().text(event({"content": text})) == text


@pytest.mark.parametrize(
    "message",
    [
        event({"role": "assistant", "content": "", "refusal": None}),
        event({}, "length"),
        b"data: [DONE]",
        b": ping",
        b"",
    ],
)
def test_other_events_have_no_text(message: bytes) -> None:
    assert Sse().text(message) is None


def test_only_the_event_with_a_reason_ends_an_answer() -> None:
    ends = [Sse().is_end(one) for one in (event({"role": "assistant"}), event({}, "length"), b"data: [DONE]")]
    assert ends == [False, True, False]


@pytest.mark.parametrize("size", [1, 7, 40, 10_000])
async def test_events_come_whole_however_they_were_cut(size: int) -> None:
    events = [event({"content": text}) for text in ("one ", "two ")] + [b"data: [DONE]"]
    found: list[tuple[int, bytes]] = []
    connection = Events("test:1", lambda stream, message: found.append((stream, message)), lambda _: None)
    body = b"".join(one + b"\n\n" for one in events)
    for at in range(0, len(body), size):
        for stream in (1, 3):
            connection._take_data(stream, body[at : at + size])
    for stream in (1, 3):
        assert [message for one, message in found if one == stream] == events


def test_fields_are_those_that_were_written() -> None:
    message = number(1, 300) + block(2, b"text") + b"\x1d" + bytes(4) + packed(4, [1, 128])
    assert list(fields(message)) == [(1, 300), (2, b"text"), (3, bytes(4)), (4, b"\x01\x80\x01")]


@pytest.mark.parametrize("message", [b"\x08", b"\x12\x05ab", b"\x0b", b"\x80"])
def test_a_broken_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="not a protobuf message"):
        list(fields(message))


def test_a_request_says_its_slot_and_the_length_of_its_prompt() -> None:
    tokenized = block(1, b"Tell me") + packed(2, [5, 300, 70_000])
    request = block(1, b"id") + block(2, tokenized) + block(4, number(8, 128) + number(24, 77)) + number(5, 1)
    assert parse_request(request) == (77, 3)


def test_an_answer_is_chunks_and_a_whole() -> None:
    *chunks, whole = answer([7, 300, 9], prompt=21, interval=2)
    assert [list(fields(inner)) for _, inner in map(_only, chunks)] == [
        [(1, varint(7) + varint(300)), (2, 21), (3, 2)],
        [(1, varint(9)), (2, 21), (3, 3)],
    ]
    field, inner = _only(whole)
    assert field == 2
    assert list(fields(inner)) == [(1, varint(7) + varint(300) + varint(9)), (2, b"length"), (3, 21), (4, 3)]


def _only(message: bytes) -> tuple[int, bytes]:
    [(field, inner)] = fields(message)
    assert isinstance(inner, bytes)
    return field, inner


class Call:
    """A response stream that keeps the messages written to it; full while `is_full`."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_over = self.is_full = False

    def try_write(self, message: bytes) -> bool:
        if not self.written or self.is_full:
            return False
        self.written.append(message)
        return True

    async def write(self, message: bytes) -> None:
        self.written.append(message)


async def test_a_worker_waits_for_the_client_and_for_room() -> None:
    received = memoryview(bytearray(8 * 4)).cast("q")
    source, call = TokenSource([7, 8], received, Pace(window=1, interval=1, step_seconds=0.0)), Call()
    handler = asyncio.ensure_future(source.generate(block(4, number(24, 2)), cast("Any", call)))
    await source.wakeup.wait()
    assert [await source.step(), await source.step()] == [True, False]
    received[2] = 1
    call.is_full = True
    assert not await source.step()
    call.is_full = False
    assert await source.step()
    await handler
    assert call.written == answer([7, 8], 0, 1)
    assert not source.running


@pytest.mark.parametrize("size", [1, 10, 31, 32, 126, 127, 128, 300])
def test_a_failed_chat_says_what_it_ended_with(size: int) -> None:
    assert problem(frames.trailers(14, "x" * size, ())) == "14 " + "x" * size


def row(variant: str, cpu: dict[str, float]) -> dict[str, Any]:
    times = dict.fromkeys(("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"), 1.0)
    return {
        "variant": variant,
        "mode": "uncoalesced",
        "window": 0,
        "streams": 8,
        "tokens_per_second": 1e4,
        **times,
        "merged_share": 0.0,
        "cpu_us_per_token": {**cpu, "backend": 5.0, "client": 6.0},
        "failed": 0,
        "rss_mb": dict.fromkeys(cpu, 70.0),
    }


def test_a_gateway_is_a_row_and_a_curve_beside_router_and_tokenizer() -> None:
    rows = [row("now", {"router": 17.0, "tokenizer": 7.5}), row("smg", {"gateway": 20.25})]
    ours, theirs = markdown(rows).splitlines()[2:]
    assert "| free | 8 | 10000 |" in ours
    assert "| 17.0 + 7.5 = 24.5 | 5.0, 6.0 | 70 + 70 |" in ours
    assert "| 20.2 | 5.0, 6.0 | 70 |" in theirs
    assert "uncoalesced, smg" in plot(rows)
