"""Processes on both event loops, and TLS between them."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import factories.servers.stack as stack
import factories.servers.tiny_service
from factories.servers.router import until

FILES = Path(factories.servers.tiny_service.__file__).parent / "tls"
NOBODY = "127.0.0.1:1"


def is_up(router: stack.Process) -> bool:
    """True once the router's metrics say that its tokenizer answers."""
    with urllib.request.urlopen(f"http://{router.metrics_address}/metrics") as answer:
        return b"\npenstock_router_tokenizer_up 1.0\n" in answer.read()


async def test_a_router_on_uvloop_reaches_a_tokenizer_with_tls_on_asyncio() -> None:
    """Each by its default: `--event-loop auto`."""
    tls = ("--tls-cert", str(FILES / "server.pem"), "--tls-key", str(FILES / "server.key"))
    tokenizer = stack.start("tokenizer", *tls)
    try:
        there = f"localhost:{tokenizer.port}"
        to_tls = ("--channel-tls-ca", str(FILES / "ca.pem"))
        router = stack.start("router", "--tokenizer", there, "--backend", NOBODY, *to_tls)
        try:
            await until(lambda: '"event": "listening"' in router.output())
            await until(lambda: is_up(router))
            assert '"event_loop": "uvloop"' in router.output()
            assert '"event_loop": "asyncio"' in tokenizer.output()
        finally:
            router.kill()
    finally:
        tokenizer.kill()


async def test_the_flag_chooses_the_loop() -> None:
    """It is for those who meet a fault of uvloop's."""
    tokenizer = stack.start("tokenizer", "--event-loop", "asyncio")
    try:
        await until(lambda: '"event": "listening"' in tokenizer.output())
        assert '"event_loop": "asyncio"' in tokenizer.output()
    finally:
        tokenizer.kill()
