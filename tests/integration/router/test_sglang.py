"""SGLang's protocol over a real connection: facts of the model, and the cached prefixes that it tells."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from factories.servers.plain_server import plain_server
from factories.servers.scripted_engine import EOS, tokenizer_zip
from penstock.common.checkpoint import DEMO_MODEL_NAME
from penstock.common.config import ServerConfig
from penstock.engines import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, smg_common_pb2
from penstock.router.backends.prefix_index import PrefixIndex, routing_hashes
from penstock.router.config import RouterConfig
from penstock.router.engines.backend_kinds import connect
from penstock.serving.transport import make_transport
from penstock.v1 import tokenizer_pb2

PROMPT = list(range(100, 170))
PAGES = [smg_common_pb2.KvBlock(block_hash=one, token_ids=[one], block_size=1) for one in PROMPT]


class Scheduler(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """SGLang without a model, with pages of one token: it tells that it has a prompt, page by page."""

    async def GetModelInfo(self, request: Any, context: Any) -> sglang_scheduler_pb2.GetModelInfoResponse:
        return sglang_scheduler_pb2.GetModelInfoResponse(
            served_model_name=DEMO_MODEL_NAME,
            is_generation=True,
            max_context_length=4096,
            vocab_size=4096,
            eos_token_ids=[EOS],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> sglang_scheduler_pb2.GetServerInfoResponse:
        return sglang_scheduler_pb2.GetServerInfoResponse()

    async def GetLoads(self, request: Any, context: Any) -> sglang_scheduler_pb2.GetLoadsResponse:
        load = sglang_scheduler_pb2.SchedulerLoad(max_total_num_tokens=4096)
        return sglang_scheduler_pb2.GetLoadsResponse(loads=[load])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[smg_common_pb2.GetTokenizerChunk]:
        yield smg_common_pb2.GetTokenizerChunk(data=tokenizer_zip())

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[smg_common_pb2.KvEventBatch]:
        for number, page in enumerate(PAGES):
            parent = PAGES[number - 1].block_hash if number else None
            stored = smg_common_pb2.KvBlocksStored(blocks=[page], parent_block_hash=parent)
            event = smg_common_pb2.KvCacheEvent(stored=stored)
            yield smg_common_pb2.KvEventBatch(sequence_number=number, events=[event])


async def test_its_pages_of_one_token_are_told_by_the_names_of_our_blocks() -> None:
    server: Any = plain_server(os.environ.get("PENSTOCK_TEST_TRANSPORT", ServerConfig.transport), 0)
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(Scheduler(), server)
    port = await server.open_port()
    await server.start()
    config, index = RouterConfig(engine_poll_seconds=0.01), PrefixIndex(1000)
    try:
        async with make_transport(config).open_channel(
            f"127.0.0.1:{port}", config, connect_timeout_seconds=config.connect_timeout_seconds
        ) as channel:
            connection = connect(f"sglang://127.0.0.1:{port}", channel, config, tokenizer_pb2.GetTokenizerResponse)
            kv = (await connection.model_info()).kv
            names = routing_hashes(PROMPT, kv.block_size, "", 100)
            assert (kv.num_blocks, len(names)) == (256, 4)
            reports = connection.watch_loads()
            while index.match(names) < len(names):
                told = (await anext(reports)).prefixes
                index.take(told.kept, told.gone, begins_anew=told.begins_anew)
            await reports.aclose()
    finally:
        await server.stop(None)
