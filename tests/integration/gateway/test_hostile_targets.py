"""No path and no query is a fault of the gateway: hostile names and parameters at every route that there is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
from factories.servers.gateway import running_gateway
from factories.servers.served import Served
from factories.wire.hostile_bodies import whole_case
from factories.wire.made_things import MadeThings, make_things, target_of
from factories.wire.plain_http import PlainHttp
from penstock.gateway import app
from penstock.gateway.openapi_answers import QUERIES

pytestmark = pytest.mark.xdist_group("gateway")
# Paths that are no route's, and the status that each must get.
_TARGETS: list[tuple[str, bytes, int]] = [
    ("GET", b"/v1/models/../x", 404),
    ("GET", b"/v1/models/a/b/%2e%2e", 404),
    ("GET", b"/%ED%A0%80", 404),
    ("GET", b"//", 404),
    ("PUT", b"/v1/chat/completions", 405),
]
_NAMES = (
    b"%ED%A0%80",
    b"%FF",
    b"%00",
    b"x" * 4000,
    b"%F0%9F%98%80",
    b"%",
    b"%zz",
    b"-1",
    b"9" * 400,
    b"None",
    b"'%20OR%20''%3D'",
    b"%25s%7B0%7D",
)
# Any method of the path answers for a name of nothing.
_NAMED = [
    (method, path) for method, paths in app.ROUTES.items() for path in paths if "{name" in path or "{item" in path
]
_NO_TEXT = (b"%ED%A0%80", b"%FF", b"%00", b"x" * 5000)
_NO_NUMBER = (b"9" * 5000, b"-1", b"1e1", b"0x1", b"%D9%A3", b"%2B1", b"1%20", b"nan", *_NO_TEXT)
# Parameter -> values that each route which has it must refuse by its name.
_REFUSED: dict[str, tuple[bytes, ...]] = {
    "limit": (*_NO_NUMBER, b"0", b"99999"),
    "starting_after": _NO_NUMBER,
    "order": (*_NO_TEXT, b"DESC", b"0"),
    "after": (*_NO_TEXT, b"-1", b"{}"),
    "stream": (*_NO_TEXT, b"1", b"True"),
    # Any other text is one that no file has.
    "purpose": (b"%00",),
    "model": (),
}
_PARAMETERS = [(method, path, name) for (method, path), names in QUERIES.items() for name in names]
# Queries that are none.
_ODD = (b"%ED%A0%80=1", b"&&&;=", b"a&" * 999, b"=", b"%", b"%00=%00", b"limit", b"?limit=1")


@asynccontextmanager
async def asked(served: Served) -> AsyncIterator[tuple[PlainHttp, MadeThings]]:
    """A connection to a gateway with one thing of each kind, which logs no fault."""
    with structlog.testing.capture_logs() as lines:
        async with running_gateway(served.grpc) as gateway, PlainHttp(*gateway.host_port) as client:
            yield client, await make_things(client)
    assert not [line for line in lines if line["log_level"] in ("warning", "error", "critical")]


async def error_of(client: PlainHttp, method: str, target: bytes, body: bytes = b"") -> tuple[int, str | None]:
    """Send a request; return its status, and the parameter that its error names."""
    status, answer = await client.ask(method.upper(), target, body)
    return status, None if status == 200 else json.loads(answer)["error"]["param"]


async def test_an_odd_target_is_no_fault(served: Served) -> None:
    async with asked(served) as (client, _):
        found = [(method, target, (await client.ask(method, target))[0]) for method, target, _ in _TARGETS]
    assert found == _TARGETS


@pytest.mark.parametrize(("method", "path"), _NAMED, ids=lambda value: value)
async def test_a_hostile_name_is_of_nothing(served: Served, method: str, path: str) -> None:
    async with asked(served) as (client, made):
        body = whole_case(path, made)[1] if method == "post" else b""
        part = "{name:path}" if "{name:path}" in path else "{item}" if "{item}" in path else "{name}"
        for name in _NAMES:
            before, _, behind = path.partition(part)
            target = target_of(before, made) + name + behind.encode()
            status, _ = await error_of(client, method, target, body)
            assert status == 404, target
        if part == "{item}":
            # The same names for what has the item.
            for name in _NAMES:
                target = path.encode().replace(b"{name}", name).replace(b"{item}", made.item_id.encode())
                assert (await error_of(client, method, target, body))[0] == 404, target


def test_every_parameter_has_values_that_are_refused() -> None:
    assert {name for _, _, name in _PARAMETERS} == _REFUSED.keys()


@pytest.mark.parametrize(("method", "path", "name"), _PARAMETERS, ids=lambda value: value)
async def test_a_hostile_parameter_is_refused_by_its_name(served: Served, method: str, path: str, name: str) -> None:
    async with asked(served) as (client, made):
        target = target_of(path, made)
        for value in _REFUSED[name]:
            query = b"?%b=%b" % (name.encode(), value)
            assert await error_of(client, method, target + query) == (400, name), query
        # No text is a fault, whatever it is that it names.
        for value in (*_NO_NUMBER, b""):
            query = b"?%b=%b" % (name.encode(), value)
            assert (await error_of(client, method, target + query))[0] in (200, 400, 404), query


@pytest.mark.parametrize(
    ("method", "path"),
    [(method, path) for method, paths in app.ROUTES.items() for path in paths if method != "post"],
    ids=lambda value: value,
)
async def test_what_a_route_does_not_read_of_a_query_changes_nothing(served: Served, method: str, path: str) -> None:
    known = QUERIES.get((method, path), {})
    unread = [
        b"%b=%b" % (name.encode(), _REFUSED[name][0]) for name in _REFUSED if name not in known and name != "model"
    ]
    async with asked(served) as (client, made):
        for query in (b"", *_ODD, *unread):
            # What a DELETE has deleted is there no more.
            target = target_of(path, made if method == "get" else await make_things(client))
            status, _ = await error_of(client, method, target + b"?" + query)
            # Whoever reads any parameter refuses a zero in each.
            assert status == (400 if known and b"=%00" in query else 200), query
