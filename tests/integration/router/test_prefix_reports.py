"""Cached prefixes that backends tell: a router sends a prompt where another router's requests left its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from factories.servers.emitting_backend import EmittingBackend
from factories.servers.only_route import only_route
from factories.servers.router import Router, backend, collect, running_router, until
from penstock.router.backends.prefix_index import routing_hashes
from penstock.v1 import admin_pb2, common_pb2, text_pb2

IDS = list(range(100, 164))
SCHEME = 1


async def names_of_prompt(router: Router, one: EmittingBackend) -> list[int]:
    """Names of the prompt's blocks at a backend that has got it."""
    await collect(router.stub.Generate(text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=IDS))))
    asked = one.submitted.pop()
    assert list(asked.prompt_token_ids) == IDS
    return routing_hashes(asked.prompt_token_ids, one.block_size, asked.cache_salt, 512)


async def places(router: Router, backends: Sequence[EmittingBackend], count: int = 6) -> list[int]:
    """Send the prompt some times, and return what each backend got."""
    for _ in range(count):
        await collect(router.stub.Generate(text_pb2.GenerateTextRequest(token_ids=common_pb2.TokenIds(ids=IDS))))
    found = [len(one.submitted) for one in backends]
    for one in backends:
        one.submitted.clear()
    return found


async def test_a_prompt_goes_where_its_beginning_is_told_to_be() -> None:
    async with backend() as one, backend() as two:
        async with running_router(one) as first:
            names = await names_of_prompt(first, one)
        two.told.append(admin_pb2.PrefixChanges(scheme=SCHEME, begins_anew=True, kept=names))
        one.told.append(admin_pb2.PrefixChanges(scheme=SCHEME, begins_anew=True))
        async with running_router(one, two) as second:
            known = only_route(second.server.service).pool.backends
            await until(lambda: max(each.match(names) for each in known) == len(names))
            assert await places(second, (one, two)) == [0, 6]
            # It has lost it, and the other one has it by now.
            two.told.append(admin_pb2.PrefixChanges(scheme=SCHEME, gone=names))
            one.told.append(admin_pb2.PrefixChanges(scheme=SCHEME, kept=names))
            await until(lambda: {each.key: each.match(names) for each in known} == {one.address: 4, two.address: 0})
            assert await places(second, (one, two)) == [6, 0]


async def test_names_of_another_way_are_not_believed_and_a_switch_asks_for_none() -> None:
    async with backend() as one, backend() as two:
        async with running_router(one) as first:
            names = await names_of_prompt(first, one)
        two.told.append(admin_pb2.PrefixChanges(scheme=SCHEME + 1, begins_anew=True, kept=names))
        async with running_router(one, two) as second:
            known = only_route(second.server.service).pool.backends
            await until(lambda: min(each.load.num_reports for each in known) > 0)
            assert [each.match(names) for each in known] == [0, 0]
        two.told[:] = [admin_pb2.PrefixChanges(scheme=SCHEME, begins_anew=True, kept=names)]
        async with running_router(one, two, prefix_reports=False) as third:
            known = only_route(third.server.service).pool.backends
            await until(lambda: min(each.load.num_reports for each in known) > 0)
            assert [each.match(names) for each in known] == [0, 0]
