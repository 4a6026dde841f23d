"""WatchLoad tells which prefixes are cached, by the names that routers make of prompts, to those who ask."""

from __future__ import annotations

import asyncio
from pathlib import Path

from factories.servers.generation import generation_service, request
from penstock.router.backends.prefix_index import PrefixIndex, routing_hashes
from penstock.v1 import admin_pb2, model_pb2

PATIENCE_SECONDS = 60.0
PROMPT = list(range(40, 110))


async def test_a_watch_tells_what_is_cached_and_what_is_not_any_more(folder: Path) -> None:
    async with generation_service(folder) as client:
        size = (await client.model.GetModelInfo(model_pb2.GetModelInfoRequest())).kv.block_size
        await client.generate(request(PROMPT, cache_salt="early"))
        early, late = (routing_hashes(PROMPT, size, salt, 512) for salt in ("early", "late"))
        watch = client.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.01, prefixes=True))
        plain = client.admin.WatchLoad(admin_pb2.WatchLoadRequest(min_interval_seconds=0.01))
        assert not (await plain.read()).HasField("prefixes")
        index, first = PrefixIndex(1000), await watch.read()
        assert (first.prefixes.scheme, first.prefixes.begins_anew) == (1, True)
        index.take(first.prefixes.kept, first.prefixes.gone, begins_anew=True)
        assert (index.match(early), index.match(late)) == (len(early), 0)

        async def until(matches: tuple[int, int]) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (index.match(early), index.match(late)) != matches:
                    told = (await watch.read()).prefixes
                    assert not told.begins_anew
                    index.take(told.kept, told.gone, begins_anew=False)

        await client.generate(request(PROMPT, cache_salt="late"))
        await until((len(early), len(late)))
        await client.admin.ClearCache(admin_pb2.ClearCacheRequest())
        await until((0, 0))
        watch.cancel()
        plain.cancel()
