"""The load of benchmarks/wire.py: so many chats at once over some connections, each slot one after the other.

Waits for a line of JSON on stdin, `{"address": …, "protocol": "grpc", "streams": 64, "requests": 8, "connections": 1,
"texts": false}`, does it, and answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from benchmarks._http2 import connect
from benchmarks._report import percentile
from benchmarks._wire_protocols import PROTOCOLS, Protocol


class Load:
    """One connection of a round: `requests` chats in each of `slots`."""

    def __init__(
        self, protocol: Protocol, received: memoryview, token_chars: int, slots: range, requests: int, *, texts: bool
    ) -> None:
        """Every token of an answer is `token_chars` characters. `texts`: keep what whole answers were."""
        self._protocol = protocol
        self._received = received
        self._token_chars = token_chars
        self._left = dict.fromkeys(slots, requests)
        self._connection: Any = None
        self._slot: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._begun: dict[int, float] = {}
        self._finished: set[int] = set()
        self._ended = asyncio.Event()
        self._texts: dict[int, str] | None = {} if texts else None
        self.whole: set[str] = set()
        self.first: list[float] = []
        self.between: list[float] = []
        self.tokens = 0
        self.failed = 0
        # Errors of streams that failed, where they can be read.
        self.problems: Counter[str] = Counter()

    async def run(self, address: str) -> None:
        """Do it. Raises ConnectionError when the server hangs up."""
        self._connection = await connect(address, self._on_message, self._on_end, self._protocol.connection)
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
        stream = self._connection.request(self._protocol.path, self._protocol.request(slot))
        self._slot[stream] = slot
        self._begun[stream] = time.perf_counter()

    def _on_message(self, stream: int, message: bytes) -> None:
        text = self._protocol.text(message)
        if text:
            now = time.perf_counter()
            last = self._last.get(stream)
            if last is None:
                self.first.append(now - self._begun[stream])
            else:
                self.between.append(now - last)
            self._last[stream] = now
            tokens = len(text) // self._token_chars
            self._received[self._slot[stream]] += tokens
            self.tokens += tokens
            if self._texts is not None:
                self._texts[stream] = self._texts.get(stream, "") + text
        elif text is None and self._protocol.is_end(message):
            self._finished.add(stream)

    def _on_end(self, stream: int) -> None:
        slot = self._slot.pop(stream)
        self._last.pop(stream, None)
        if stream not in self._finished:
            self.failed += 1
            self.problems[problem(self._connection.trailers)] += 1
        if self._texts is not None and stream in self._finished:
            self.whole.add(self._texts.pop(stream, ""))
        if self._left[slot]:
            self._next(slot)
        elif not self._slot:
            self._ended.set()


def problem(trailers: bytes) -> str:
    """Status and message of a header block without table and Huffman code, as Penstock's own transport writes it."""
    # A length is any byte: 10 is a line's end, and from 127 on there are more of them.
    found = re.findall(rb"grpc-(?:status|message)(?:\x7f[\x80-\xff]*[\0-\x7f]|.)([ -~]+)", trailers, re.DOTALL)
    return " ".join(part.decode() for part in found) or "unknown"


async def run(received: memoryview, token_chars: int, task: dict[str, Any]) -> dict[str, Any]:
    """Do a task and say how it went; times in seconds."""
    protocol, texts = PROTOCOLS[task["protocol"]], task["texts"]
    connections = max(min(task["connections"], task["streams"]), -(-task["streams"] // protocol.max_streams))
    slots = [range(first, task["streams"], connections) for first in range(connections)]
    loads = [Load(protocol, received, token_chars, some, task["requests"], texts=texts) for some in slots]
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
        "problems": dict(sum((load.problems for load in loads), Counter())),
        "texts": sorted(set().union(*(load.whole for load in loads))),
        "ttft": [percentile(first or [0.0], share) for share in (0.5, 0.99)],
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
