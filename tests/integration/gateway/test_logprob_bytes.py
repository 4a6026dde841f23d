"""Log-probabilities of tokens that are parts of characters: their own bytes, and no two alternatives under one name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from factories.servers.scripted_gateway import ScriptedGateway, scripted_gateway
from penstock_client import AsyncClient

TEXT = "Hi 🦜, 世界"


@asynccontextmanager
async def scripted() -> AsyncIterator[ScriptedGateway]:
    """A model that writes TEXT, with the ids of TEXT as alternatives."""
    async with scripted_gateway(TEXT) as served:
        served.backend.alternatives = list(dict.fromkeys(served.ids))
        yield served


def joined(entries: Sequence[dict[str, Any]]) -> str:
    return b"".join(bytes(entry["bytes"]) for entry in entries).decode()


def is_part(raw: Sequence[int]) -> bool:
    return "\ufffd" in bytes(raw).decode("utf-8", "replace")


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_bytes_of_a_chat_are_those_of_its_text(is_stream: bool) -> None:
    async with scripted() as served:
        body = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 8}
        if is_stream:
            chunks = await served.events("/v1/chat/completions", {**body, "stream": True})
            entries = [
                entry
                for chunk in chunks
                for choice in chunk["choices"]
                for entry in (choice["logprobs"] or {"content": ()})["content"]
            ]
        else:
            answer = await served.json("/v1/chat/completions", body)
            entries = answer["choices"][0]["logprobs"]["content"]
        assert joined(entries) == TEXT
        assert any(is_part(entry["bytes"]) for entry in entries)
        for entry in entries:
            for one in (entry, *entry["top_logprobs"]):
                assert "\ufffd" not in one["token"]
                assert is_part(one["bytes"]) or one["token"].encode() == bytes(one["bytes"])
            names = [one["token"] for one in entry["top_logprobs"]]
            assert len(set(names)) == len(names) == 8


async def test_bytes_of_a_streamed_response_are_those_of_its_text() -> None:
    async with scripted() as served:
        body = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 3, "stream": True}
        status, _, text = await served.ask("/v1/responses", body)
        assert status == 200
        told = [json.loads(line.removeprefix("data: ")) for line in text.decode().splitlines() if line[:5] == "data:"]
        deltas = [event for event in told if event["type"] == "response.output_text.delta"]
        entries = [entry for event in deltas for entry in event["logprobs"]]
        assert "".join(event["delta"] for event in deltas) == TEXT
        assert joined(entries) == TEXT
        assert {len(entry["top_logprobs"]) for entry in entries} == {3}
        (done,) = [event for event in told if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == entries
        (part,) = told[-1]["response"]["output"][0]["content"]
        assert part["logprobs"] == entries


async def test_bytes_of_a_response_are_those_of_its_text() -> None:
    async with scripted() as served:
        answer = await served.json("/v1/responses", {"input": "Hi", "top_logprobs": 3})
        (part,) = answer["output"][0]["content"]
        assert joined(part["logprobs"]) == TEXT


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_alternatives_of_a_completion_are_kept_apart(is_stream: bool) -> None:
    async with scripted() as served:
        body = {"prompt": "Once", "logprobs": 8}
        if is_stream:
            chunks = await served.events("/v1/completions", {**body, "stream": True})
            lists = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        else:
            lists = [(await served.json("/v1/completions", body))["choices"][0]["logprobs"]]
        tops = [top for one in lists for top in one["top_logprobs"]]
        tokens = [token for one in lists for token in one["tokens"]]
        offsets = [offset for one in lists for offset in one["text_offset"]]
        assert [len(top) for top in tops] == [8] * len(served.ids)
        assert all(token in top for token, top in zip(tokens, tops, strict=True)), "lm-eval looks the token up"
        assert any(token.startswith("bytes:") and r"\xf0" in token for token in tokens)
        assert "\ufffd" not in "".join(name for top in tops for name in top)
        # The token that begins with a character, or within it, has that character's place.
        assert offsets[tokens.index(",")] == TEXT.index(",")


async def test_the_client_has_the_bytes() -> None:
    async with scripted() as served, AsyncClient(served.served.grpc) as client:
        entries = (await client.generate("Once", top_logprobs=1)).choices[0].logprobs
        assert b"".join(entry.token_bytes for entry in entries).decode() == TEXT
        assert any(entry.raw for entry in entries)
