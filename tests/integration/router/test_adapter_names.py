"""Adapters of real generation services as clients see them: by `adapter` and `model`, lists, methods and commands."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from factories.models.adapters import lora_folder
from factories.servers.generation import generation_service
from factories.servers.router import Router, running_router
from factories.servers.stack import penstock
from factories.wire.conversation import user
from penstock.common.checkpoint import demo_folder
from penstock_client import AsyncClient, FailedPrecondition, NotFound

SETTINGS = {"kv_memory": "32MiB", "dtype": "float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the adapters left, right and both."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("left", "right", "both")):
        lora_folder(folder / name, demo_folder(), seed=seed)
    return folder


@contextlib.asynccontextmanager
async def two_services(root: Path) -> AsyncIterator[tuple[Router, tuple[str, str]]]:
    """One service with the adapters left and both, one with right and both, a router, and the addresses."""
    left, right = ((f"{name}={root / name}", f"both={root / 'both'}") for name in ("left", "right"))
    async with (
        generation_service(demo_folder(), lora=left, **SETTINGS) as one,
        generation_service(demo_folder(), lora=right, **SETTINGS) as two,
    ):
        addresses = (one.running.address, two.running.address)
        async with running_router(backend=addresses) as router:
            yield router, addresses


async def test_one_name_is_model_and_adapter_and_each_request_goes_where_it_is(root: Path) -> None:
    async with two_services(root) as (router, backends), AsyncClient(router.server.address) as client:
        texts = {}
        for name in ("left", "right", "both"):
            by_adapter = await client.generate("Hello", adapter=name, max_new_tokens=24)
            by_model = await client.generate(user("Hello"), model=name, max_new_tokens=24)
            assert by_adapter.text == (await client.generate("Hello", model=name, max_new_tokens=24)).text
            assert by_model.finished.attempts == 1
            texts[name] = by_adapter.text

        models = {model.name: model for model in await client.list_models()}
        assert {name: (one.parent, one.backends) for name, one in models.items()} == {
            "penstock-demo": ("", 2),
            "left": ("penstock-demo", 1),
            "both": ("penstock-demo", 2),
            "right": ("penstock-demo", 1),
        }
        assert (await client.get_model("right")).parent == "penstock-demo"
        with pytest.raises(NotFound) as unknown:
            await client.generate("Hello", adapter="nobody")
        assert unknown.value.field == "adapter"

        # Each of them thinks something else of the same text.
        names = ("", "left", "right", "both")
        scores = {name: (await client.score([("Hello", " world")], adapter=name)).scores[0].logprob for name in names}
        vectors = {name: (await client.embed("Hello", adapter=name)).vectors[0] for name in names}
        assert len(set(scores.values())) == len(set(vectors.values())) == 4
        assert (await client.score([("Hello", " world")], model="left")).scores[0].logprob == scores["left"]
        with pytest.raises(NotFound):
            await client.embed("Hello", adapter="nobody")

        # Its commands: of two backends one is named.
        address = router.server.address
        code, out, err = await penstock("adapters", "list", "--address", address, "--json", "--backend", backends[0])
        assert (code, err) == (0, "")
        assert [one["name"] for one in json.loads(out)] == ["left", "both"]
        code, _, err = await penstock("adapters", "list", "--address", address)
        assert code == 2
        assert "--backend" in err
        code, _, err = await penstock("adapters", "load", "more", "--address", address, "--backend", backends[0])
        assert code == 1
        assert "--adapter-root" in err
        with pytest.raises(FailedPrecondition):
            await client.load_adapter("more", backend=backends[0])
        code, out, _ = await penstock(
            *("complete", "Hello", "--adapter", "left", "--max-new-tokens", "24", "--address", address)
        )
        assert (code, out.rstrip("\n")) == (0, texts["left"].rstrip("\n"))


async def test_operators_load_reload_and_unload_by_the_command_line(root: Path) -> None:
    async with generation_service(demo_folder(), adapter_root=str(root)) as service:
        at = ("--address", service.running.address)
        assert await penstock("adapters", "list", *at) == (0, "no adapters\n", "")
        code, out, err = await penstock("adapters", "load", "mine", "left", *at)
        assert (code, err) == (0, "")
        assert "rank 8" in out
        code, _, err = await penstock("adapters", "load", "mine", "right", *at)
        assert code == 1
        assert "INVALID_ARGUMENT" in err
        assert (await penstock("adapters", "load", "mine", "right", "--replace", *at))[0] == 0
        code, out, _ = await penstock("adapters", "list", *at)
        assert code == 0
        assert all(word in out for word in ("mine", "right", "q_proj"))
        code, _, err = await penstock("adapters", "list", "--backend", "x:1", *at)
        assert code == 2
        assert "is not a router" in err
        assert await penstock("adapters", "unload", "mine", *at) == (0, "mine: unloaded\n", "")
        code, _, err = await penstock("adapters", "unload", "mine", *at)
        assert (code, "NOT_FOUND" in err) == (1, True)


async def test_an_adapter_that_cannot_be_loaded_is_told_at_the_start(root: Path) -> None:
    value = f"mine={root / 'nowhere'}"
    code, _, err = await penstock("serve", "generation", "--port", "0", "--metrics-port", "-1", "--lora", value)
    assert code == 2
    assert "--lora mine=" in err.splitlines()[-1], err
