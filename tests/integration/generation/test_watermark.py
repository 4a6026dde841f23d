"""Watermarks put on by requests and found by DetectWatermark: at the service, through a router, from the clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from factories.servers.generation import Client, generation_service
from factories.servers.router import Router, running_router
from factories.servers.stack import penstock
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument, NotFound, PenstockError, from_rpc_error
from penstock.v1 import common_pb2, config_pb2, generation_pb2, text_pb2
from penstock_client import AsyncClient
from penstock_client import Client as SyncClient

pytestmark = pytest.mark.asyncio(loop_scope="module")
MARK: dict[str, Any] = {"greenlist_ratio": 0.25, "bias": 8.0, "hashing_key": 4711}
SELF_HASHED = {**MARK, "seeding_scheme": "selfhash", "context_width": 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[Client]:
    settings = {"max_watermark_tokens": 512, "max_watermark_context": 8}
    async with generation_service(demo_folder(), kv_memory="16MiB", **settings) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(client: Client) -> AsyncIterator[Router]:
    async with running_router(backend=(client.running.address,)) as one:
        yield one


async def generated(router: Router, mark: dict[str, Any] | None, seed: int = 1) -> list[int]:
    """Ids drawn so hot that hardly any n-gram comes twice, which would count as often."""
    async with AsyncClient(router.server.address) as client:
        options: dict[str, Any] = {"watermarking_config": mark} if mark else {}
        answer = await client.generate(
            "The", max_new_tokens=120, do_sample=True, temperature=4.0, seed=seed, ignore_eos=True,
            return_token_ids=True, **options,
        )  # fmt: skip
        return list(answer.choices[0].token_ids)


def message(ids: list[int], mark: dict[str, Any] | None = None, **fields: Any) -> generation_pb2.DetectWatermarkRequest:
    watermark = None if mark is None else config_pb2.WatermarkingConfig(**mark)
    return generation_pb2.DetectWatermarkRequest(token_ids=ids, watermarking_config=watermark, **fields)


async def test_evidence_comes_whole(client: Client, router: Router) -> None:
    """Figures are held to transformers' in tests/numerics."""
    ids = await generated(router, SELF_HASHED)
    found = (await client.generation.DetectWatermark(message(ids, SELF_HASHED))).evidence
    assert found.prediction
    assert len(found.green_positions) == found.num_green_tokens
    assert found.num_tokens_scored == len(ids) - found.first_scored_position
    assert found.z_score > 3
    assert 0 <= found.p_value < 0.01


async def test_synthid_is_found_by_its_configuration_and_nothing_else(router: Router) -> None:
    mark = {"ngram_len": 3, "keys": list(range(1, 21))}
    marked, plain = await generated(router, mark), await generated(router, None)
    async with AsyncClient(router.server.address) as client:
        found = await client.detect_watermark(marked, watermarking_config=mark)
        assert found.prediction
        assert len(found.green_positions) == found.num_green_tokens
        assert not (await client.detect_watermark(plain, watermarking_config=mark)).prediction
        other = {**mark, "keys": list(range(101, 121))}
        assert not (await client.detect_watermark(marked, watermarking_config=other)).prediction


async def test_both_clients_find_marked_ids_and_text_and_nothing_else(router: Router) -> None:
    marked, plain = await generated(router, MARK), await generated(router, None)
    text = await router.decode(marked)
    async with AsyncClient(router.server.address) as client:
        found = await client.detect_watermark(marked, watermarking_config=MARK)
        assert found.prediction
        assert found.token_ids == tuple(marked)
        assert found.confidence == 1 - found.p_value > 0.99
        assert found == await asyncio.to_thread(_detect_in_step, router.server.address, marked)
        assert (await client.detect_watermark(text, watermarking_config=MARK)).prediction
        assert not (await client.detect_watermark(plain, watermarking_config=MARK)).prediction
        # Another key has other green lists.
        assert not (await client.detect_watermark(marked, watermarking_config={**MARK, "hashing_key": 4712})).prediction
        strict = await client.detect_watermark(marked, watermarking_config=MARK, z_threshold=found.z_score)
        assert (strict.z_score, strict.prediction) == (found.z_score, False)


def _detect_in_step(address: str, ids: list[int]) -> object:
    with SyncClient(address) as client:
        return client.detect_watermark(ids, watermarking_config=MARK)


async def test_repeated_ngrams_count_once_when_asked(client: Client) -> None:
    ids = [8, 9] * 10
    once = (await client.generation.DetectWatermark(message(ids, MARK, ignore_repeated_ngrams=True))).evidence
    every = (await client.generation.DetectWatermark(message(ids, MARK))).evidence
    assert (once.num_tokens_scored, every.num_tokens_scored) == (2, 19)
    assert once.green_positions == every.green_positions


async def error_of(call: Any) -> PenstockError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (message([]), "token_ids"),
        (message([5]), "token_ids"),
        (message([5, 6], {"context_width": 2}), "token_ids"),
        (message([5, 1 << 20]), "token_ids"),
        (message([5] * 513), "token_ids"),
        (message([5, 6], z_threshold=float("nan")), "z_threshold"),
        (message([5, 6], {"greenlist_ratio": 1.5}), "watermarking_config.greenlist_ratio"),
        (message([5, 6], {"seeding_scheme": "other"}), "watermarking_config.seeding_scheme"),
        (message([5, 6], {"hashing_key": 2**63}), "watermarking_config.hashing_key"),
        (message([5, 6], {"context_width": 0}), "watermarking_config.context_width"),
        (message([5, 6], {"context_width": 9}), "watermarking_config.context_width"),
    ],
)
async def test_what_is_wrong_is_refused_by_field(
    client: Client, asked: generation_pb2.DetectWatermarkRequest, field: str
) -> None:
    error = await error_of(client.generation.DetectWatermark(asked))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_another_models_name_is_not_found(client: Client) -> None:
    assert isinstance(await error_of(client.generation.DetectWatermark(message([5, 6], model="other"))), NotFound)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "output"),
        ({"text": ""}, "text"),
        ({"text": "hello " * 600}, "text"),
        ({"token_ids": common_pb2.TokenIds(ids=[5])}, "token_ids"),
        ({"text": "a b", "z_threshold": float("inf")}, "z_threshold"),
    ],
)
async def test_the_router_names_its_own_fields(router: Router, fields: dict[str, Any], field: str) -> None:
    error = await error_of(router.stub.DetectWatermark(text_pb2.DetectWatermarkTextRequest(**fields)))
    assert isinstance(error, InvalidArgument)
    assert error.field == field


async def test_the_command_line_detects_too(router: Router) -> None:
    marked = await generated(router, SELF_HASHED)
    flags = ("--hashing-key", "4711", "--seeding-scheme", "selfhash", "--context-width", "2")
    asked = ("watermark", "detect", "-", "--token-ids", "--address", router.server.address)
    stdin = " ".join(map(str, marked))
    code, stdout, stderr = await penstock(*asked, *flags, "--json", stdin=stdin)
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["prediction"] is True
    code, stdout, stderr = await penstock(*asked, stdin=stdin)
    assert (code, stderr) == (0, "")
    assert stdout.startswith("no watermark: z ")
    code, _, stderr = await penstock(*asked, stdin="5 six")
    assert code == 2
    assert "--token-ids" in stderr
