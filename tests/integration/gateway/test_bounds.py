"""Readers that leave or stop, tokens, drain, bounds of HTTP: a gateway before a router with a scripted backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.emitting_backend import count_up
from factories.servers.gateway import running_gateway
from factories.servers.http_connection import Connection
from factories.servers.router import backend, running_router, until
from penstock.common.errors import ResourceExhausted, StartupError
from penstock.serving import health_probe

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
# More than any test reads.
ENDLESS = count_up(1_000_000)
# Events of so many are more than what lies in sockets, windows and buffers.
PAUSED_TOKENS = 4_000
ROUTES: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "chat/completions": ({"messages": HELLO}, lambda choice: choice["delta"].get("content", "")),
    "completions": ({"prompt": [1]}, lambda choice: choice["text"]),
}


def events_of(answer: bytes) -> list[bytes]:
    """Data of the events of an answer in chunks."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    body, at = bytearray(), 0
    while size := int(rest[at : (line := rest.index(b"\r\n", at))], 16):
        body += rest[line + 2 : line + 2 + size]
        at = line + size + 4
    return [event.removeprefix(b"data: ") for event in bytes(body).split(b"\n\n") if event]


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
async def test_a_reader_that_leaves_frees_its_request(is_stream: bool) -> None:
    async with (
        backend(script=ENDLESS, obeys_budget=False, step_seconds=0.001) as one,
        running_router(one) as router,
        running_gateway(router.server.address) as gateway,
    ):
        connection = await Connection.to(gateway)
        connection.post("/v1/chat/completions", {"messages": HELLO, "stream": is_stream})
        await until(lambda: one.steps > 5)
        assert gateway.metric("http_requests_in_flight") == 1
        connection.close()
        await until(lambda: len(one.aborted) == 1)
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)
        assert gateway.metric("readers_left_total") == 1
        assert gateway.metric("http_requests_total", route="/v1/chat/completions", status="499") == 1


async def test_a_reader_that_stops_is_cut_off_and_the_others_go_on() -> None:
    async with (
        backend(script=ENDLESS, obeys_budget=False) as one,
        running_router(one, max_buffered_bytes=1 << 16) as router,
        running_gateway(router.server.address, stalled_reader_seconds=0.5) as gateway,
    ):
        stopped = await Connection.to(gateway)
        stopped.post("/v1/chat/completions", {"messages": HELLO, "stream": True})
        assert await stopped.status() == 200
        stopped.writer.transport.pause_reading()  # type: ignore[attr-defined]
        stream = await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO, stream=True)
        count = 0
        async for _ in stream:
            count += 1
            if count > 200:
                break
        assert count > 200
        await stream.close()
        await until(lambda: gateway.metric("http_requests_in_flight") == 0)
        await until(lambda: len(one.aborted) == 2)
        # The router may have given the request up before the gateway did.
        assert gateway.metric("readers_stalled_total") <= 1
        stopped.close()


@pytest.mark.parametrize("route", ROUTES)
async def test_a_reader_that_pauses_gets_the_whole_answer_in_order(route: str) -> None:
    asked, text_of = ROUTES[route]
    script = count_up(PAUSED_TOKENS)
    async with (
        backend(script=script) as one,
        running_router(one, max_buffered_bytes=1 << 20) as router,
        running_gateway(router.server.address, answer_window_bytes=16 << 10) as gateway,
    ):
        # Buffers of the usual size.
        connection = Connection(*await asyncio.open_connection(*gateway.host_port, limit=4096))
        connection.post(f"/v1/{route}", {**asked, "max_tokens": PAUSED_TOKENS, "stream": True}, "connection: close")
        assert await connection.status() == 200
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: one.steps >= PAUSED_TOKENS)
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        *events, done = events_of(await connection.until_closed())
        connection.close()
        assert done == b"[DONE]"
        texts = [text for event in events if (text := text_of(json.loads(event)["choices"][0]))]
        assert "".join(texts) == await router.decode(list(script(0)))
        # What waited for it came as fewer events.
        assert len(texts) < PAUSED_TOKENS


async def test_tokens_are_the_routers_matter(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, metrics_token_file=str(tokens)) as gateway,
    ):
        answer = await gateway.openai("right").chat.completions.create(model="penstock-demo", messages=HELLO)
        assert answer.choices[0].message.content
        shown = [f"authorization: {one}" for one in ("Bearer wrong", "Bearer wr\u00f6ng", "Bearer ", "Bearer", "", "x")]
        for header in (*shown, "x-api-key: ", "x-api-key: wrong", "x: y"):
            connection = await Connection.to(gateway)
            connection.post("/v1/chat/completions", {"messages": HELLO}, header)
            assert await connection.status() == 401
            connection.close()
        with pytest.raises(openai.AuthenticationError) as caught:
            await gateway.openai("wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        connection = await Connection.to(gateway)
        connection.writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await connection.status() == 401
        connection.close()


async def test_the_gateways_own_token_is_for_callers_without_one(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("right\n")
    async with (
        backend() as one,
        running_router(one, auth_token_file=str(tokens)) as router,
        running_gateway(router.server.address, channel_token_file=str(tokens)) as gateway,
    ):
        for headers, status in (((), 200), (("authorization: Bearer wrong",), 401)):
            connection = await Connection.to(gateway)
            connection.post("/v1/chat/completions", {"messages": HELLO}, *headers)
            assert await connection.status() == status
            connection.close()


async def test_overload_is_429_with_the_time_to_wait() -> None:
    wait = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_seconds=2.5)
    never = ResourceExhausted("too large", reason="REQUEST_TOO_LARGE")
    async with backend() as one, running_router(one) as router, running_gateway(router.server.address) as gateway:
        for error, header in ((wait, "retry-after"), (never, "x-should-retry")):
            one.refuse = error
            with pytest.raises(openai.RateLimitError) as caught:
                await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO, stream=True)
            assert caught.value.response.headers[header]


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_request_that_no_message_holds_is_413(transport: str) -> None:
    async with (
        backend() as one,
        running_router(one, max_request_bytes=65536, transport=transport) as router,
        running_gateway(router.server.address) as gateway,
    ):
        for route, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}),
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}], "stream": True}),
            ("embeddings", {"input": "x" * 100_000}),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await gateway.openai().post(f"/{route}", body=body, cast_to=object)
            assert caught.value.status_code == 413
            assert caught.value.code == "message_too_large"
            assert caught.value.response.headers["x-should-retry"] == "false"


async def test_an_error_in_a_stream_is_an_event() -> None:
    async with (
        backend(script=ENDLESS, obeys_budget=False, step_seconds=0.001) as one,
        running_router(one, failover_wait_seconds=0.1) as router,
        running_gateway(router.server.address) as gateway,
    ):
        stream = await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO, stream=True)
        await anext(stream)
        await one.stop()
        with pytest.raises(openai.APIError) as caught:
            [chunk async for chunk in stream]
        assert caught.value.type == "server_error"


async def test_requests_at_work_are_bounded_and_drained() -> None:
    async with (
        backend(allowance=3) as one,
        running_router(one) as router,
        running_gateway(router.server.address, max_requests=1) as gateway,
    ):
        stream = await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO)
        assert caught.value.response.headers["retry-after"] == "1"
        stopping = asyncio.create_task(gateway.app.stop())
        await until(lambda: gateway.app.is_draining)
        with pytest.raises(openai.InternalServerError) as refused:
            await gateway.openai().chat.completions.create(model="penstock-demo", messages=HELLO)
        assert refused.value.status_code == 503
        await one.allow(None)
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "stop"
        await stopping


async def test_bodies_headers_and_connections_are_bounded() -> None:
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(
            router.server.address,
            max_body_bytes=1024,
            max_header_bytes=2048,
            header_seconds=0.3,
            body_seconds=0.3,
            max_connections=4,
        ) as gateway,
    ):
        large = await Connection.to(gateway)
        large.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]})
        assert await large.status() == 413
        large.close()
        slow = await Connection.to(gateway)
        slow.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{")
        assert await slow.status() == 408
        slow.close()
        silent, endless = await Connection.to(gateway), await Connection.to(gateway)
        endless.writer.write(b"GET /health HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000)
        assert b" 431 " in await endless.until_closed()
        assert await silent.until_closed() == b""
        await until(lambda: gateway.metric("http_connections") == 0)
        held = [await Connection.to(gateway) for _ in range(4)]
        one_more = await Connection.to(gateway)
        one_more.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await one_more.status() == 200
        assert await held[0].until_closed() == b""
        one_more.close()
        for connection in held:
            connection.close()


async def test_pages_of_other_origins_may_call_only_when_they_are_named() -> None:
    async with backend() as one, running_router(one) as router:
        for settings, allowed in (({}, False), ({"allowed_origin": ("https://chat.example",)}, True)):
            async with running_gateway(router.server.address, **settings) as gateway:
                connection = await Connection.to(gateway)
                connection.writer.write(
                    b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\norigin: https://chat.example\r\n"
                    b"access-control-request-method: POST\r\nconnection: close\r\n\r\n"
                )
                answer = await connection.until_closed()
                assert (b"access-control-allow-origin" in answer) == allowed
                connection.close()


async def test_a_page_of_another_origin_cannot_send_even_what_browsers_do_not_ask_about() -> None:
    foreign, own = "origin: https://evil.example", "origin: http://localhost"
    async with backend() as one, running_router(one) as router:
        for settings, cases in (
            (
                {},
                (
                    ((foreign,), 403),
                    ((foreign, "sec-fetch-site: cross-site"), 403),
                    (("origin: null", "sec-fetch-site: same-site"), 403),
                    # A proxy may have changed Host: the browser's own word goes before it.
                    ((foreign, "sec-fetch-site: same-origin"), 200),
                    # As `Connection.post` names the host.
                    ((own,), 200),
                ),
            ),
            ({"allowed_origin": ("https://evil.example",)}, (((foreign, "sec-fetch-site: cross-site"), 200),)),
        ):
            async with running_gateway(router.server.address, **settings) as gateway:
                for headers, status in cases:
                    connection = await Connection.to(gateway)
                    connection.post("/tokenize", {"prompt": "x"}, *headers, "content-type: text/plain")
                    assert await connection.status() == status, headers
                    connection.close()


async def test_a_callers_request_id_is_that_of_its_answer_and_of_the_routers_request() -> None:
    async with backend() as one, running_router(one) as router, running_gateway(router.server.address) as gateway:
        client = gateway.openai().with_options(default_headers={"x-request-id": "mine-1"})
        answer = await client.chat.completions.create(model="penstock-demo", messages=HELLO)
        assert (answer.id, answer._request_id) == ("chatcmpl-mine-1", "mine-1")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="penstock-demo", messages=[])
        assert caught.value.request_id == "mine-1"
        odd = gateway.openai().with_options(default_headers={"x-request-id": "no {id}"})
        listed = await odd.chat.completions.with_raw_response.create(model="penstock-demo", messages=HELLO)
        assert len(listed.headers["x-request-id"]) == 32


async def test_a_get_with_a_body_is_answered_and_the_connection_goes_on() -> None:
    async with backend() as one, running_router(one) as router, running_gateway(router.server.address) as gateway:
        connection = await Connection.to(gateway)
        connection.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        assert await connection.status() == 200
        assert b"penstock-demo" in await connection.reader.readuntil(b"]}")
        connection.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert await connection.status() == 200
        connection.close()


async def test_the_containers_check_asks_by_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "health.sock"
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, health_socket=str(path)) as gateway,
    ):
        assert await asyncio.to_thread(health_probe.main, [str(path)]) == 0
        await gateway.app.stop()
        assert not path.exists()


async def test_health_follows_the_router() -> None:
    async with (
        backend() as one,
        running_router(one, failover_wait_seconds=0.1) as router,
        running_gateway(router.server.address) as gateway,
    ):
        await one.stop()

        async def status() -> int:
            connection = await Connection.to(gateway)
            connection.writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            found = await connection.status()
            connection.close()
            return found

        async with asyncio.timeout(60):
            while await status() != 503:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with pytest.raises(openai.InternalServerError) as caught:
            await (
                gateway.openai()
                .with_options(timeout=30)
                .chat.completions.create(model="penstock-demo", messages=HELLO, extra_body={})
            )
        assert caught.value.status_code == 503


async def test_a_start_without_a_router_names_the_flag() -> None:
    with pytest.raises(StartupError) as caught:
        async with running_gateway("127.0.0.1:1", start_timeout_seconds=0.2):
            pass
    assert caught.value.flag == "--router"
