"""The load of benchmarks/wire.py: so many chats at once over some connections, each slot one after the other.

Waits for a line of JSON on stdin, `{"address": …, "streams": 64, "requests": 8, "connections": 1}`, does it, and
answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from penstock.v1 import config_pb2, text_pb2, tokenizer_pb2

from benchmarks._http2 import connect
from benchmarks._report import percentile

_PATH = "/penstock.v1.TextService/Chat"
# The first byte of a ChatResponse says which event it holds.
_DELTA, _FINISHED = 0x12, 0x1A


class Load:
    """One connection of a round: `requests` chats in each of `slots`."""

    def __init__(self, received: memoryview, token_chars: int, slots: range, requests: int) -> None:
        """Every token of an answer is `token_chars` characters."""
        self._received = received
        self._token_chars = token_chars
        self._left = dict.fromkeys(slots, requests)
        self._connection: Any = None
        self._slot: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        self._finished: set[int] = set()
        self._ended = asyncio.Event()
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = 0
        self.failed = 0

    async def run(self, address: str) -> None:
        """Do it."""
        self._connection = await connect(address, self._on_message, self._on_end)
        for slot in self._left:
            self._next(slot)
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((ended, self._connection.lost), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise self._connection.lost.result()
        self._connection.close()

    def _next(self, slot: int) -> None:
        self._left[slot] -= 1
        self._received[slot] = 0
        prompt = tokenizer_pb2.Message(role="user", content=f"Tell me about Penstock, number {slot}.")
        request = text_pb2.ChatRequest(messages=[prompt], config=config_pb2.GenerationConfig(seed=slot))
        stream = self._connection.request(_PATH, request.SerializeToString())
        self._slot[stream] = slot
        self._begun[stream] = time.perf_counter()

    def _on_message(self, stream: int, message: bytes) -> None:
        kind = message[0]
        if kind == _DELTA:
            now = time.perf_counter()
            last = self._last.get(stream)
            if last is None:
                self.first.append(now - self._begun[stream])
            else:
                self.between.append(now - last)
            self._last[stream] = now
            tokens = len(text_pb2.ChatResponse.FromString(message).delta.text) // self._token_chars
            self._received[self._slot[stream]] += tokens
            self.tokens += tokens
        elif kind == _FINISHED:
            self._finished.add(stream)

    def _on_end(self, stream: int) -> None:
        slot = self._slot.pop(stream)
        self._last.pop(stream, None)
        self.failed += stream not in self._finished
        if self._left[slot]:
            self._next(slot)
        elif not self._slot:
            self._ended.set()


async def run(received: memoryview, token_chars: int, task: dict[str, Any]) -> dict[str, Any]:
    """Do a task and say how it went; times in seconds."""
    connections = min(task["connections"], task["streams"])
    slots = [range(first, task["streams"], connections) for first in range(connections)]
    loads = [Load(received, token_chars, some, task["requests"]) for some in slots]
    begin, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(load.run(task["address"]) for load in loads))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    first = [value for load in loads for value in load.first]
    between = [value for load in loads for value in load.between]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens": sum(load.tokens for load in loads),
        "messages": len(first) + len(between),
        "failed": sum(load.failed for load in loads),
        "ttft": [percentile(first, share) for share in (0.5, 0.99)],
        "itl": [percentile(between or [0.0], share) for share in (0.5, 0.9, 0.99)],
    }


def main() -> None:
    """Command line; benchmarks/wire.py writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counters", type=Path, required=True, help="file of a 64-bit counter for each slot")
    parser.add_argument("--token-chars", type=int, required=True, help="characters of every token")
    arguments = parser.parse_args()
    with arguments.counters.open("r+b") as file:
        received = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(asyncio.run(run(received, arguments.token_chars, task))), flush=True)


if __name__ == "__main__":
    main()
