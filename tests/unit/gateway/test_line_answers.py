"""Answers to the lines of batches: which refusals are a line's own, and which come from the gateway's key."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.credentials import secret_digest
from penstock.common.errors import PenstockError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.line_answers import LineAnswers
from penstock.jobs.job_records import TakenLine
from penstock.router.keys.api_key import KeyScope, scope_missing
from penstock_client import AsyncClient, ClientConfig

URL = "/v1/completions"


def line(key_digest: str) -> TakenLine:
    return TakenLine("batch_1", "owner", URL, 0, "0", "file-1", 0, 0, key_digest)


async def is_put_back(refusal: PenstockError, key_digest: str) -> bool:
    """Return True when a line that is refused so waits for another time; False when the refusal is its answer."""

    async def refuse(_: Any) -> bytes:
        raise refusal

    async with AsyncClient("127.0.0.1:1", ClientConfig()) as client:
        answers = LineAnswers(GatewayConfig(), lambda: client, {URL: refuse}, None)
        outcome = await answers.answer(line(key_digest), b'{"body": {"prompt": "Hello"}}')
    return outcome.body is None


@pytest.mark.parametrize("scope", [KeyScope.GENERATE, KeyScope.DELEGATE])
async def test_a_line_waits_while_the_gateways_key_lacks_a_scope(scope: KeyScope) -> None:
    assert await is_put_back(scope_missing((scope,)), secret_digest(b"sk-owner").hex())


async def test_a_scope_that_the_callers_key_lacks_is_the_lines_answer() -> None:
    assert not await is_put_back(scope_missing((KeyScope.GENERATE,), of_owner=True), secret_digest(b"sk-owner").hex())


async def test_a_line_without_a_key_of_its_own_has_the_refusal_for_its_answer() -> None:
    assert not await is_put_back(scope_missing((KeyScope.GENERATE,)), "")
