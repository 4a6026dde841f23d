"""Cost of reading and writing small gRPC messages by `penstock.http2` and by the h2 package, in one process.

No sockets: a chunk of bytes is what one turn of the event loop would read or write. *Write*: a message to each of the
streams of a server's connection, then the bytes of all of them. *Read*: as many messages of one stream in one chunk,
at a client. h2 gives DATA frames; taking gRPC's messages out of them would come on top. The two take turns.

    python -m venv /tmp/h2 && /tmp/h2/bin/pip install h2
    python benchmarks/http2_frames.py --h2 /tmp/h2/lib/python3.*/site-packages
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in (".", "services")]
from hpack import Encoder
from penstock.common.config import ChannelConfig, ServerConfig
from penstock.http2 import frames
from penstock.http2.client_stream import StreamCall
from penstock.http2.server_call import Call
from penstock.http2.server_connection import Connection
from penstock.serving.transport import http2_limits

from benchmarks._arguments import at_least
from benchmarks._report import Table

_REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/b"), (":authority", "a"), ("te", "trailers")]
_REQUEST.append(("content-type", "application/grpc"))
_ANSWER = [(":status", "200"), ("content-type", "application/grpc")]
Run = Callable[[int], Awaitable[None]]


class _Wire(asyncio.Transport):
    """Takes bytes and forgets them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def write(self, data: Any) -> None:
        self.num_bytes += len(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


async def our_writer(streams: int, message: bytes) -> Run:
    """Writes to all streams in a turn; ends with as many turns as it is asked for."""
    calls: list[Call] = []
    wire = _Wire()
    limits = http2_limits(ServerConfig(), max_streams=streams)
    connection = Connection(limits, calls.append, lambda _: None, lambda _: None)
    connection.connection_made(wire)
    most = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
    connection.data_received(frames.PREFACE + frames.settings(()) + frames.window_update(0, most))
    block = Encoder().encode(_REQUEST)
    for stream in range(1, 2 * streams, 2):
        connection.data_received(frames.header_frames(stream, block, end=True, limit=1 << 14))
        connection.data_received(frames.window_update(stream, most))
    for call in calls:
        await call.write(b"")
    await asyncio.sleep(0)

    async def run(turns: int) -> None:
        before = wire.num_bytes
        for _ in range(turns):
            for call in calls:
                call.try_write(message)
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert wire.num_bytes - before == turns * streams * (frames.FRAME_HEAD + frames.MESSAGE_HEAD + len(message))

    return run


async def our_reader(streams: int, message: bytes) -> Run:
    """Reads chunks of as many messages as there are streams."""
    got: list[bytes] = []
    call: StreamCall[bytes] = StreamCall(frames.request_headers(_REQUEST), bytes, ChannelConfig())
    call.connection_made(_Wire())
    call.data_received(frames.settings(()))
    call.data_received(frames.header_frames(1, frames.RESPONSE_HEADERS, end=False, limit=1 << 14))
    task = asyncio.ensure_future(call.run(got.append))
    await asyncio.sleep(0)
    chunk = frames.message_frame(1, message) * streams

    async def run(turns: int) -> None:
        assert not task.done()
        for _ in range(turns):
            call.data_received(chunk)
        assert len(got) == turns * streams
        got.clear()

    return run


def _h2_pair() -> tuple[Any, Any]:
    """A client and a server that know each other."""
    from h2.config import H2Configuration
    from h2.connection import H2Connection

    client, server = (H2Connection(H2Configuration(client_side=side, header_encoding=None)) for side in (True, False))
    client.initiate_connection()
    server.initiate_connection()
    return client, server


def _exchange(client: Any, server: Any) -> None:
    server.receive_data(client.data_to_send())
    client.receive_data(server.data_to_send())


async def h2_writer(streams: int, message: bytes) -> Run:
    """The same by h2, with gRPC's five bytes before each message."""
    client, server = _h2_pair()
    most = frames.MAX_WINDOW - frames.DEFAULT_WINDOW
    _exchange(client, server)
    client.increment_flow_control_window(most)
    numbers = list(range(1, 2 * streams, 2))
    for stream in numbers:
        client.send_headers(stream, _REQUEST, end_stream=True)
        client.increment_flow_control_window(most, stream)
    _exchange(client, server)
    for stream in numbers:
        server.send_headers(stream, _ANSWER)
    _exchange(client, server)

    async def run(turns: int) -> None:
        size = 0
        for _ in range(turns):
            for stream in numbers:
                server.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message)
            size += len(server.data_to_send())
        assert size == turns * streams * (frames.FRAME_HEAD + frames.MESSAGE_HEAD + len(message))

    return run


async def h2_reader(streams: int, message: bytes) -> Run:
    """The same by h2, which leaves the messages in their frames."""
    client, server = _h2_pair()
    _exchange(client, server)
    client.send_headers(1, _REQUEST)
    _exchange(client, server)
    server.send_headers(1, _ANSWER)
    _exchange(client, server)
    chunk = frames.message_frame(1, message) * streams

    async def run(turns: int) -> None:
        from h2.events import DataReceived

        for _ in range(turns):
            found = 0
            for event in client.receive_data(chunk):
                assert isinstance(event, DataReceived)
                found += 1
                client.acknowledge_received_data(event.flow_controlled_length, 1)
            client.data_to_send()
            assert found == streams

    return run


async def _measure(arguments: argparse.Namespace) -> None:
    message = bytes(arguments.bytes)
    kinds = {"write, penstock": our_writer, "write, h2": h2_writer, "read, penstock": our_reader, "read, h2": h2_reader}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    turns = arguments.messages // arguments.streams
    for _ in range(arguments.rounds):
        for name, make in kinds.items():
            run = await make(arguments.streams, message)
            await run(max(1, turns // 10))
            begin = time.process_time()
            await run(turns)
            seconds[name].append((time.process_time() - begin) / (turns * arguments.streams))
    table = Table(("what", "messages a second", "µs a message"), None)
    for name, found in seconds.items():
        table.row(name, f"{1 / median(found):.0f}", f"{1e6 * median(found):.2f}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--h2", type=Path, required=True, help="folder with the h2 package and what it needs")
    parser.add_argument("--streams", type=at_least(1), default=64, help="messages in a turn")
    parser.add_argument("--bytes", type=at_least(0), default=50, help="of a message; a delta of a token is about 50")
    parser.add_argument("--messages", type=at_least(1), default=100_000, help="of a round")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    arguments = parser.parse_args()
    sys.path.append(str(arguments.h2))
    asyncio.run(_measure(arguments))


if __name__ == "__main__":
    main()
