"""`penstock debug state` through a router: of several backends the one that --backend names is asked."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from factories.servers.generation import generation_service
from factories.servers.router import Router, running_router
from factories.servers.stack import penstock
from penstock.common.checkpoint import demo_folder
from penstock.router.backends.discovery import BackendAddress

# Of the two backends: facts of their states that tell them apart.
BLOCK_SIZES = (16, 32)


@dataclass
class Two:
    """A router before two generation services, and their addresses."""

    router: Router
    backends: tuple[str, str]


@contextlib.asynccontextmanager
async def two_backends(*names: str) -> AsyncIterator[Two]:
    """`names`: of the backends in the router's --backend; by default their addresses."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(generation_service(demo_folder(), block_size=size)) for size in BLOCK_SIZES
        ]
        one, two = (client.running.address for client in clients)

        async def resolve(_: object) -> dict[str, set[BackendAddress]]:
            found: dict[str, set[BackendAddress]] = {}
            for name, address in zip(names, (one, two), strict=True):
                found.setdefault(name, set()).add(BackendAddress(address, name))
            return found

        router = running_router(backend=tuple(dict.fromkeys(names)) or (one, two), resolver=resolve if names else None)
        yield Two(await stack.enter_async_context(router), (one, two))


async def debug_state(address: str, *flags: str, backend: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error. `backend`: the variable."""
    variables = {} if backend is None else {"PENSTOCK_DEBUG_BACKEND": backend}
    return await penstock("debug", "state", "--json", "--address", address, *flags, **variables)


async def test_the_backend_that_is_named_is_asked_and_without_a_name_all_are_listed() -> None:
    async with two_backends() as two:
        router = two.router.server.address
        for address, size in zip(two.backends, BLOCK_SIZES, strict=True):
            code, out, err = await debug_state(router, "--backend", address)
            assert (code, err) == (0, "")
            assert json.loads(out)["config"]["block_size"] == size
        code, out, _ = await debug_state(router, backend=two.backends[1])
        assert json.loads(out)["config"]["block_size"] == BLOCK_SIZES[1]

        for flags in ((), ("--backend", "127.0.0.1:1")):
            code, out, err = await debug_state(router, *flags)
            assert (code, out, len(err.splitlines())) == (2, "", 1)
            assert all(told in err for told in ("--backend", *two.backends))
            assert "metadata" not in err


async def test_a_backend_has_the_name_that_the_router_was_given() -> None:
    async with two_backends("gen-a:50052", "gen-b:50052") as two:
        router = two.router.server.address
        code, out, err = await debug_state(router, "--backend", "gen-b:50052")
        assert (code, err) == (0, "")
        assert json.loads(out)["config"]["block_size"] == BLOCK_SIZES[1]
        code, _, err = await debug_state(router)
        assert code == 2
        assert f"{two.backends[0]} (gen-a:50052)" in err


async def test_a_name_of_several_backends_is_refused_with_their_addresses() -> None:
    async with two_backends("gen:50052", "gen:50052") as two:
        code, _, err = await debug_state(two.router.server.address, "--backend", "gen:50052")
        assert code == 2
        assert all(told in err for told in ("--backend", "several backends", *two.backends))


@pytest.mark.parametrize("transport", ["asyncio", "grpc"])
async def test_a_generation_service_does_not_answer_for_another(transport: str) -> None:
    async with generation_service(demo_folder(), transport=transport) as client:
        address = client.running.address
        code, out, err = await debug_state(address, "--backend", address)
        assert (code, out) == (2, "")
        assert "is not a router" in err
        assert "--backend" in err
