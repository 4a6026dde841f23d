"""No method, path or header ends in a fault of the gateway: each is answered, or the connection is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import structlog
from factories.servers.gateway import running_gateway
from factories.servers.served import Served

pytestmark = pytest.mark.xdist_group("gateway")
_BODY = b'{"prompt": "Hello"}'
_METHODS = (
    b"GET",
    b"POST",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"PATCH",
    b"DELETE",
    b"TRACE",
    b"CONNECT",
    b"FOO",
    b"get",
    b"\xff",
)
_TARGETS = (
    *(b"*", b"", b"x", b"//v1/models", b"/ x", b"/v1/models\xff", b"/\xff", b"/v1/responses/\xff", b"/v1/models/\x80"),
    *(b"http://x/v1/models", b"/v1/models?\xff=\xfe", b"/v1/models/%", b"/v1/models/%zz", b"/v1/models#x"),
    *(b"/v1/responses/a/input_items?limit=\xff", b"/v1/models/" + b"%ED%A0%80" * 2000, b"/v1/models/" + b"a/" * 3000),
    *(b"/?" + b"a=b&" * 9000, b"/%2e%2e/%2e%2e/etc/passwd", b"/v1/models/\0", b"/v1/models/\x7f", b"/v1/models/\r"),
    *(b"/v1/chat/completions", b"/v1/responses/x", b"/v1/models", b"/", b"/health", b"/metrics"),
)
_HEADERS = (
    *(b"authorization", b"x-api-key", b"x-request-id", b"traceparent", b"tracestate", b"content-type", b"accept"),
    *(b"accept-encoding", b"content-encoding", b"origin", b"sec-fetch-site", b"cookie", b"expect", b"te", b"host"),
    *(b"transfer-encoding", b"content-length", b"connection", b"upgrade", b"anthropic-version", b"range"),
    *(b"x-forwarded-for", b"if-none-match"),
)
_VALUES = (
    *(b"", b" ", b"\t", b"x", b"\xff\xfe", b"\xed\xa0\x80", b"9" * 5000, b"x" * 20_000, b"-1", b"1e9", b"0x1", b"\x7f"),
    *(b"a,b", b"Bearer ", b"Bearer \xff", b"Bearer x y", b"Basic eA==", b"=;=", b"null", b"\0", b"a\rb"),
    *(b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-01", b"00-" + b"0" * 32 + b"-0-01"),
)


def _with(name: bytes, value: bytes) -> bytes:
    """A good request with one header of this value."""
    lines = [b"POST /tokenize HTTP/1.1", name + b": " + value]
    lines += [b"host: localhost"] if name != b"host" else []
    lines += [b"content-length: %d" % len(_BODY)] if name not in (b"content-length", b"transfer-encoding") else []
    return b"\r\n".join((*lines, b"", _BODY))


_TARGET_CASES = [
    method + b" " + target + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"
    for method in _METHODS
    for target in _TARGETS
]
_HEADER_CASES = [_with(name, value) for name in _HEADERS for value in _VALUES]


async def _status(address: tuple[str, int], request: bytes) -> int:
    """Send a request; return the status of the answer, 0 where the connection is closed without one."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request)
        await writer.drain()
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.transport.abort()


# Every fifth has each method, target, header and value.
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_TARGET_CASES[::5], id="targets"),
        pytest.param(_HEADER_CASES[::5], id="headers"),
        pytest.param(_TARGET_CASES, id="all targets", marks=pytest.mark.slow),
        pytest.param(_HEADER_CASES, id="all headers", marks=pytest.mark.slow),
    ],
)
async def test_no_head_is_a_fault(served: Served, cases: Sequence[bytes]) -> None:
    left, wrong = iter(cases), []

    async def send(address: tuple[str, int]) -> None:
        for request in left:
            status = await _status(address, request)
            if status >= 500:
                wrong.append((status, request[:100]))

    # A head that goes on, or a body that does not come, ends by these.
    bounds = {"header_seconds": 1.0, "body_seconds": 1.0}
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(served.grpc, answer_seconds=30.0, **bounds) as gateway:
            await asyncio.gather(*(send(gateway.host_port) for _ in range(8)))
            assert await _status(gateway.host_port, _with(b"x-y", b"z")) == 200
    assert not wrong
    assert not [line for line in lines if line["log_level"] in ("warning", "error", "critical")]
