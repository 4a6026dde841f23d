"""State of the router after a tokenizer that was lost before it was ready."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from factories.models.tokenizer_folders import demo_vocabulary, detokenizers_of
from penstock.http2.client_connection import rpc_error
from penstock.router.config import RouterConfig
from penstock.router.metrics import RouterMetrics
from penstock.router.tokenizer.detokenize import Detokenizer
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.tokenizer import convert
from penstock.v1 import tokenizer_pb2 as pb
from prometheus_client import CollectorRegistry


class Stub:
    """Stub of a tokenizer that goes away before its DecodeStream opens."""

    async def GetTokenizer(self, _: Any, **__: Any) -> pb.GetTokenizerResponse:
        return pb.GetTokenizerResponse(tokenizer_fingerprint="one")

    async def GetDecodeTable(self, _: Any, **__: Any) -> AsyncIterator[pb.GetDecodeTableResponse]:
        for part in convert.decode_table(detokenizers_of(demo_vocabulary()).table):
            yield part


class Channel:
    """Channel to that tokenizer."""

    async def open_stream(self, _: str, __: Any) -> Any:
        raise rpc_error(grpc.StatusCode.UNAVAILABLE, "gone")


async def test_the_table_of_a_tokenizer_that_was_lost_at_once_is_not_used_with_the_next_one() -> None:
    config, detokenizer = RouterConfig(tokenizer=("a:1",), backend=("b:1",)), Detokenizer(max_outstanding=16)
    link: Any = TokenizerLink(config, detokenizer, RouterMetrics(CollectorRegistry()), on_change=lambda: None)

    async def serving(_: Any) -> None:
        pass

    link._wait_until_serving = serving
    with pytest.raises(grpc.aio.AioRpcError):
        await link._serve(Channel(), Stub(), "a:1")
    # The next one may have another fingerprint.
    assert not link.fingerprint
    assert detokenizer._table is None
    assert not link._is_decoding_chosen
