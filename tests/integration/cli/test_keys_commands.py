"""`penstock keys list`, `usage` and `revoke` against a router with keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from factories.servers.key_files import bearer, secret_of, write_keys
from factories.servers.router import backend, collect, generate, running_router
from penstock.cli.keys.keys_command import run_list, run_revoke, run_usage
from penstock.common.errors import FailedPrecondition, PermissionDenied
from penstock.v1 import config_pb2


async def test_an_operator_sees_and_revokes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = write_keys(tmp_path / "keys.toml", a={"tokens_per_day": 1000, "tenant": "t"}, boss={"scopes": ["admin"]})
    async with backend() as one, running_router(one, keys_file=keys) as router:
        asked = generate(config=config_pb2.GenerationConfig(max_new_tokens=4))
        answer = await collect(router.stub.Generate(asked, metadata=bearer("a")))

        async def run(command: Any, by: str = "boss", **given: Any) -> str:
            token = tmp_path / "token"
            token.write_text(secret_of(by))
            given |= {"address": router.server.address, "token_file": str(token)}
            await asyncio.to_thread(command, given)
            return capsys.readouterr().out

        shown = await run(run_list)
        assert "a of t" in shown
        assert "1,000 tokens" in shown
        used = json.loads(await run(run_usage, json=True))[0]["usage"][0]
        assert (int(used["answers"]), int(used["completion_tokens"])) == (1, 4)
        assert f"{answer.finished.usage.prompt_tokens} prompt" in await run(run_usage)
        with pytest.raises(PermissionDenied):
            await run(run_list, by="a")
        assert await run(run_revoke, label="a") == "a: revoked\n"
        assert "revoked" in await run(run_list)


async def test_a_router_without_keys_says_so() -> None:
    async with backend() as one, running_router(one) as router:
        with pytest.raises(FailedPrecondition, match="--keys-file"):
            await asyncio.to_thread(run_list, {"address": router.server.address})
