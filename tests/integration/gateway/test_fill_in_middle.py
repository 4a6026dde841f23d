"""Text between two others, control tokens that a prompt spells, and seeds below 0, over `/v1/completions`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from factories.servers import stack
from factories.servers.scripted_gateway import scripted_gateway
from penstock.common.checkpoint import demo_folder
from penstock.common.errors import InvalidArgument
from penstock.generator.requests import RequestMaker
from penstock.generator.text import LocalTokenizer
from penstock.router.config import RouterConfig
from penstock.router.frontend.convert import check
from penstock.text.fill_in_middle import FORMS, form_of
from penstock.tokenizer.load_process import load
from penstock.v1 import common_pb2, text_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from penstock_client._options import generate_request
from tokenizers import Tokenizer

TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PREFIX, SUFFIX = "def one():\n    return ", "\n\nprint(one())"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with tokens for filling in the middle."""
    made = tmp_path_factory.mktemp("fim")
    for path in demo_folder().glob("*token*"):
        shutil.copy(path, made)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(str(made / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Iterator[tuple[str, str]]:
    process = stack.start("tokenizer", str(folder))
    try:
        stack.wait_serving(process.address, process)
        with grpc.insecure_channel(process.address) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            info = stub.GetTokenizer(tokenizer_pb2.GetTokenizerRequest())
        yield process.address, info.tokenizer_fingerprint
    finally:
        process.kill()


def encoded(folder: Path) -> list[int]:
    """The prompt as its model reads it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(f"{TOKENS[0]}{PREFIX}{TOKENS[1]}{SUFFIX}{TOKENS[2]}").ids
    return ids


async def test_a_suffix_makes_the_prompt_that_the_model_was_trained_on(folder: Path, tokenizer: Any) -> None:
    async with scripted_gateway("1", tokenizer=tokenizer) as served:
        answer = await served.json("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX})
        assert answer["choices"][0]["text"] == "1"
        assert list(served.backend.submitted[-1].prompt_token_ids) == encoded(folder)
        ids = list(await served.router.encode(PREFIX))
        await served.json("/v1/completions", {"prompt": ids, "suffix": SUFFIX})
        assert list(served.backend.submitted[-1].prompt_token_ids) == encoded(folder)
        await served.json("/v1/completions", {"prompt": PREFIX, "suffix": ""})
        assert list(served.backend.submitted[-1].prompt_token_ids) == list(await served.router.encode(PREFIX))


async def test_a_spelled_control_token_is_warned_about_and_a_field_allows_it(folder: Path, tokenizer: Any) -> None:
    text = f"{TOKENS[0]}{PREFIX}{TOKENS[1]}{SUFFIX}{TOKENS[2]}"
    async with scripted_gateway("1", tokenizer=tokenizer) as served:
        plain = await served.json("/v1/completions", {"prompt": text})
        (warning,) = plain["penstock"]["warnings"]
        assert all(token in warning for token in (*TOKENS, "parse_special_tokens"))
        assert PREFIX not in warning
        assert list(served.backend.submitted[-1].prompt_token_ids) != encoded(folder)
        parsed = await served.json("/v1/completions", {"prompt": text, "parse_special_tokens": True})
        assert parsed["penstock"]["warnings"] == []
        assert list(served.backend.submitted[-1].prompt_token_ids) == encoded(folder)
        asked = await served.json("/v1/completions", {"prompt": text, "parse_special_tokens": False})
        assert asked["penstock"]["warnings"] == []
        none = await served.json("/v1/completions", {"prompt": PREFIX})
        assert none["penstock"]["warnings"] == []


async def test_a_model_without_such_tokens_refuses_a_suffix() -> None:
    async with scripted_gateway("1") as served:
        status, _, text = await served.ask("/v1/completions", {"prompt": PREFIX, "suffix": SUFFIX})
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, "suffix")
        assert "no tokens for filling in the middle" in error["message"]
        status, _, text = await served.ask("/v1/completions", {"prompt": [1, 2], "suffix": SUFFIX})
        assert (status, json.loads(text)["error"]["param"]) == (400, "suffix")


def test_a_prompt_in_this_process_is_the_same(folder: Path) -> None:
    maker = RequestMaker(LocalTokenizer(load(folder)), None)
    made = maker.make(PREFIX, {"suffix": SUFFIX})
    assert list(made.message.prompt_token_ids) == encoded(folder)


def test_a_suffix_stands_behind_no_embeddings() -> None:
    asked = text_pb2.GenerateTextRequest(suffix="x", inputs_embeds=common_pb2.Tensor(shape=[1, 1]))
    with pytest.raises(InvalidArgument, match="inputs_embeds") as raised:
        check(asked, RouterConfig())
    assert raised.value.field == "suffix"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_an_unknown_token_is_none_of_a_family(form: Any) -> None:
    with pytest.raises(InvalidArgument, match="no tokens for filling in the middle"):
        form_of(dict.fromkeys(form.tokens, 7))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_every_family_has_its_order(form: Any) -> None:
    ids = {token: 100 + number for number, token in enumerate(form.tokens)}
    assert form_of(ids) == form
    made = form.arranged(ids, [1], [2], [3])
    assert made[0] == 1
    assert (made.index(3) < made.index(2)) is form.suffix_first
    assert (made[made.index(2) - 1], made[made.index(3) - 1]) == (ids[form.prefix], ids[form.suffix])
    assert len(made) == 3 + len(form.tokens)


@pytest.mark.parametrize("seed", [-1, -(2**63), -12345])
async def test_a_seed_below_0_is_one(seed: int) -> None:
    assert generate_request("x", {"seed": seed}).config.seed == seed + 2**63
    async with scripted_gateway("1") as served:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ):
            answer = await served.json(path, {**body, "seed": seed})
            assert answer["penstock"]["seed"] == seed + 2**63
