"""Keys over HTTP, by OpenAI's own client: rights, quotas and their headers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.key_files import secret_of, write_keys
from factories.servers.router import backend, running_router

pytestmark = pytest.mark.xdist_group("gateway")
OTHER = "other-model"
KEYS: dict[str, dict[str, Any]] = {
    "reads": {"scopes": ["embed"]},
    "writes": {"models": [OTHER]},
    "slow": {"requests_per_minute": 1},
    "little": {"tokens_per_day": 10},
    "batches": {"scopes": ["jobs"]},
    "gone": {"revoked": True},
}


@asynccontextmanager
async def keyed_gateway(folder: Path, **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway before a router with KEYS and two models."""
    path = write_keys(folder / "keys.toml", **KEYS)
    async with (
        backend() as one,
        backend(model=OTHER) as two,
        running_router(one, two, keys_file=path) as router,
        running_gateway(router.server.address, **settings) as gateway,
    ):
        yield gateway


async def complete(client: openai.AsyncOpenAI, model: str = OTHER, tokens: int = 4) -> Any:
    return await client.completions.create(model=model, prompt="Hello", max_tokens=tokens)


async def test_rights_and_quotas_of_keys(tmp_path: Path) -> None:
    async with keyed_gateway(tmp_path) as gateway:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await complete(gateway.openai("sk-of-nobody-at-all"))
        assert unknown.value.code == "invalid_api_key"

        # The second is refused without a question to the router.
        for _ in range(2):
            with pytest.raises(openai.AuthenticationError, match="revoked") as revoked:
                await complete(gateway.openai(secret_of("gone")))
            assert revoked.value.response.json()["error"]["reason"] == "KEY_REVOKED"

        reads, writes = (gateway.openai(secret_of(label)) for label in ("reads", "writes"))
        with pytest.raises(openai.PermissionDeniedError, match="generate") as denied:
            await complete(reads)
        assert (denied.value.code, denied.value.type) == ("scope_missing", "permission_error")
        assert [model.id async for model in writes.models.list()] == [OTHER]
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await complete(writes, "penstock-demo")
        assert (denied.value.code, denied.value.param) == ("model_not_allowed", "model")
        assert (await complete(writes)).usage.completion_tokens == 4

        slow = gateway.openai(secret_of("slow"))
        await complete(slow)
        with pytest.raises(openai.RateLimitError, match="requests_per_minute") as limited:
            await complete(slow)
        headers = limited.value.response.headers
        assert limited.value.code == "rate_limit_exceeded"
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
        assert 0 < int(headers["retry-after"]) <= 60
        assert "x-should-retry" not in headers

        with pytest.raises(openai.RateLimitError, match="tokens_per_day") as limited:
            await complete(gateway.openai(secret_of("little")), tokens=50)
        headers = limited.value.response.headers
        assert (limited.value.code, limited.value.type) == ("insufficient_quota", "insufficient_quota")
        assert (headers["x-ratelimit-limit-tokens"], headers["x-ratelimit-remaining-tokens"]) == ("10", "10")
        assert headers["x-should-retry"] == "false"


async def test_files_need_the_scope_jobs(tmp_path: Path) -> None:
    pytest.importorskip("python_multipart")
    async with keyed_gateway(tmp_path) as gateway:
        with pytest.raises(openai.PermissionDeniedError, match="jobs"):
            await gateway.openai(secret_of("writes")).files.create(file=("a", b"x"), purpose="batch")
        file = await gateway.openai(secret_of("batches")).files.create(file=("a", b"x"), purpose="batch")
        assert file.bytes == 1
