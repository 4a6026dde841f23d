"""Lines of batches where the router has keys: each counts for the key of its owner, within its quotas and rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.key_files import secret_of, write_keys
from factories.servers.router import backend, running_router
from openai.types import Batch
from penstock.common.credentials import secret_digest
from penstock.common.errors import PermissionDenied
from penstock.gateway.endpoint import call_metadata
from penstock.gateway.job_rights import JobRights
from penstock_client import AsyncClient, AsyncJobsClient, ClientConfig, FailedPrecondition

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.xdist_group("gateway")
URL, EMBED_URL, OTHER = "/v1/completions", "/v1/embeddings", "other-model"
# Between two looks at a batch.
PAUSE_SECONDS = 0.02
KEYS: dict[str, dict[str, Any]] = {
    "owner": {"scopes": ["generate", "jobs"], "models": [OTHER]},
    "little": {"scopes": ["generate", "jobs"], "tokens_per_day": 12},
    "reads": {"scopes": ["embed", "jobs"]},
    "gateway": {"scopes": ["generate", "embed", "delegate"], "models": []},
    "plain": {"scopes": ["generate", "embed"]},
    "delegate": {"scopes": ["embed", "delegate"]},
    "boss": {"scopes": ["admin"]},
}


@dataclass
class Keyed:
    """A gateway before a router with KEYS, two models and one token without a key."""

    gateway: Gateway
    router: str
    keys_file: Path

    def client(self, token: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.gateway.url, api_key=token, max_retries=0, timeout=60)

    def jobs(self, label: str) -> AsyncJobsClient:
        return AsyncJobsClient(self.gateway.app.jobs_address, ClientConfig(token=secret_of(label)))

    async def used(self, label: str) -> int:
        """Return the tokens of a key today."""
        async with AsyncClient(self.router, ClientConfig(token=secret_of("boss"))) as client:
            (key,) = [one for one in await client.list_keys() if one.label == label]
            return sum(day.prompt_tokens + day.completion_tokens for day in key.usage)


@asynccontextmanager
async def keyed(folder: Path, job_token: str = secret_of("gateway")) -> AsyncIterator[Keyed]:
    """Run them; the gateway sends lines with `job_token`."""
    own, services = folder / "own", folder / "services"
    own.write_text(job_token)
    services.write_text("a-service-of-ours\n")
    keys = write_keys(folder / "keys.toml", **KEYS)
    async with (
        backend() as one,
        backend(model=OTHER) as two,
        running_router(one, two, keys_file=keys, auth_token_file=str(services), keys_interval_seconds=0.05) as router,
        running_gateway(router.server.address, job_token_file=str(own), job_poll_seconds=0.05, jobs_port=0) as gateway,
    ):
        yield Keyed(gateway, router.server.address, Path(keys))


def jsonl(*bodies: dict[str, Any], url: str = URL) -> bytes:
    """Return lines with these bodies; their ids are their numbers."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": url, "body": body} for number, body in enumerate(bodies)
    )
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def submitted(client: openai.AsyncOpenAI, data: bytes, url: Any = URL) -> Batch:
    file = await client.files.create(file=("lines.jsonl", data), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    """Poll a batch, as its callers do, until it has ended."""
    while (now := await client.batches.retrieve(batch.id)).status in ("validating", "in_progress"):  # noqa: ASYNC110
        await asyncio.sleep(PAUSE_SECONDS)
    return now


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return the status and body of each line in a file of answers."""
    if file_id is None:
        return {}
    found = [json.loads(line) for line in (await client.files.content(file_id)).content.splitlines()]
    return {one["custom_id"]: (one["response"]["status_code"], one["response"]["body"]) for one in found}


def asked(model: str = OTHER, tokens: int = 4) -> dict[str, Any]:
    return {"model": model, "prompt": "Hello", "max_tokens": tokens}


@pytest.mark.parametrize("job_token", [secret_of("gateway"), "a-service-of-ours"])
async def test_lines_count_for_the_key_of_their_owner_and_have_its_models(tmp_path: Path, job_token: str) -> None:
    async with keyed(tmp_path, job_token) as run, run.client(secret_of("owner")) as client:
        done = await ended(client, await submitted(client, jsonl(asked(), asked(), asked("penstock-demo"))))
        answers, errors = await lines_of(client, done.output_file_id), await lines_of(client, done.error_file_id)
        assert (done.status, set(answers), set(errors)) == ("completed", {"0", "1"}, {"2"})
        usages = [body["usage"]["total_tokens"] for _, body in answers.values()]
        assert await run.used("owner") == sum(usages) > 0
        status, body = errors["2"]
        assert (status, body["error"]["code"], body["error"]["param"]) == (403, "model_not_allowed", "model")
        assert await run.used("gateway") == 0


async def test_the_calls_of_lines_need_the_scopes_of_their_owner(tmp_path: Path) -> None:
    async with keyed(tmp_path) as run, run.client(secret_of("reads")) as client:
        written = await ended(client, await submitted(client, jsonl(asked())))
        ((status, body),) = (await lines_of(client, written.error_file_id)).values()
        assert (status, body["error"]["code"]) == (403, "scope_missing")
        read = jsonl({"model": OTHER, "input": "Hello"}, url=EMBED_URL)
        done = await ended(client, await submitted(client, read, EMBED_URL))
        ((status, _),) = (await lines_of(client, done.error_file_id)).values()
        # The scripted backend embeds nothing.
        assert status == 501


async def test_a_day_that_is_used_up_holds_lines_and_rights_that_change_hold_for_the_rest(tmp_path: Path) -> None:
    async with keyed(tmp_path) as run, run.client(secret_of("little")) as client:
        # Two lines of 4 tokens and a prompt of 1 fit a day of 12; one of 50 never does.
        batch = await submitted(client, jsonl(*(asked() for _ in range(4)), asked(tokens=50)))
        counts: Any = batch.request_counts
        while counts.completed + counts.failed < 3:
            await asyncio.sleep(PAUSE_SECONDS)
            counts = (await client.batches.retrieve(batch.id)).request_counts
        assert (counts.completed, counts.failed) == (2, 1)
        async with run.client(secret_of("owner")) as other:
            assert (await ended(other, await submitted(other, jsonl(asked())))).status == "completed"
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        assert await run.used("little") == 10
        write_keys(run.keys_file, **{**KEYS, "little": {**KEYS["little"], "models": []}})
        done = await ended(client, batch)
        assert (done.request_counts and done.request_counts.failed) == 3
        errors = await lines_of(client, done.error_file_id)
        reasons = [(status, body["error"]["reason"]) for status, body in errors.values()]
        assert sorted(reasons) == [(403, "MODEL_NOT_ALLOWED"), (403, "MODEL_NOT_ALLOWED"), (429, "QUOTA_EXCEEDED")]


async def test_lines_over_grpc_count_as_those_over_http(tmp_path: Path) -> None:
    async with keyed(tmp_path) as run, run.jobs("owner") as client:
        lines = jsonl(asked(), asked("penstock-demo")).splitlines()
        batch = await client.submit_batch((line.decode() for line in lines), endpoint=URL)
        done = await client.wait_batch(batch.id, poll_seconds=PAUSE_SECONDS, timeout=60)
        assert (done.completed_lines, done.failed_lines) == (1, 1)
        assert await run.used("owner") > 0
        assert await run.used("gateway") == 0


async def test_a_job_token_that_may_not_act_for_others_makes_no_batches(tmp_path: Path) -> None:
    async with keyed(tmp_path, secret_of("plain")) as run, run.client(secret_of("owner")) as client:
        with pytest.raises(openai.BadRequestError, match="delegate") as caught:
            await submitted(client, jsonl(asked()))
        assert caught.value.code == "no_job_token"
        async with run.jobs("owner") as jobs:
            with pytest.raises(FailedPrecondition, match="delegate"):
                await jobs.submit_batch([jsonl(asked()).decode()], endpoint=URL)


async def test_a_job_key_without_the_scope_of_the_lines_makes_no_batches(tmp_path: Path) -> None:
    async with keyed(tmp_path, secret_of("delegate")) as run, run.client(secret_of("owner")) as client:
        with pytest.raises(openai.BadRequestError, match="scope generate") as caught:
            await submitted(client, jsonl(asked()))
        assert caught.value.code == "no_job_token"
        async with run.jobs("owner") as jobs:
            with pytest.raises(FailedPrecondition, match="scope generate"):
                await jobs.submit_batch([jsonl(asked()).decode()], endpoint=URL)
            read = jsonl({"model": OTHER, "input": "Hello"}, url=EMBED_URL)
            assert (await jobs.submit_batch([read.decode()], endpoint=EMBED_URL)).endpoint == EMBED_URL


async def test_a_callers_key_that_is_gone_is_not_the_fault_of_the_job_token(tmp_path: Path) -> None:
    async with keyed(tmp_path) as run:
        config = ClientConfig(token=secret_of("gateway"), call_metadata=call_metadata)
        async with AsyncClient(run.router, config) as own:
            rights = JobRights(lambda: own)
            assert (
                await rights.key_of_batch(secret_of("owner"), URL) == secret_digest(secret_of("owner").encode()).hex()
            )
            with pytest.raises(PermissionDenied) as caught:
                await rights.key_of_batch(secret_of("nobody"), URL)
            assert caught.value.reason == "KEY_GONE"


async def test_lines_of_a_token_without_a_key_count_for_nobody(tmp_path: Path) -> None:
    async with keyed(tmp_path) as run, run.client("a-service-of-ours") as client:
        done = await ended(client, await submitted(client, jsonl(asked(), asked("penstock-demo"))))
        assert (done.request_counts and done.request_counts.completed) == 2
        assert await run.used("gateway") == 0
