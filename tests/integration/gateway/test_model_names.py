"""Several `--served-model-name`: each is taken, listed and told; the first one stands in answers."""

from __future__ import annotations

import json

import pytest
from factories.servers import stack
from factories.servers.scripted_gateway import scripted_gateway
from penstock.cli.serve.tree import role_arguments
from penstock.common.options import load
from penstock.generation.config import GenerationServiceConfig
from penstock.tokenizer.config import TokenizerConfig
from penstock_client import Client

HELLO = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("given", [["a", "b"], ["a,b"], "a,b"], ids=str)
def test_names_are_given_one_by_one_or_together(given: object) -> None:
    for config in (GenerationServiceConfig, TokenizerConfig):
        assert load(config, {"served_model_name": given}, {}).served_model_name == ("a", "b")  # type: ignore[type-var]
    for role in ("generation", "tokenizer"):
        made = role_arguments(role, {"served_model_name": given})
        assert [flag for flag in made if "served-model-name" in flag]


async def test_each_name_is_the_model() -> None:
    async with scripted_gateway("Fine.", aliases=("gpt-4o", "mine/too")) as served:
        listed = await served.json("/v1/models")
        assert [model["id"] for model in listed["data"]] == ["penstock-demo", "gpt-4o", "mine/too"]
        assert all(model["ready"] and model["parent"] is None for model in listed["data"])
        for name in ("penstock-demo", "gpt-4o", "mine/too"):
            assert (await served.json(f"/v1/models/{name}"))["id"] == name
            for path, body in (
                ("/v1/chat/completions", {"messages": HELLO}),
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/responses", {"input": "x"}),
                ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
            ):
                answer = await served.json(path, {**body, "model": name})
                assert answer["model"] == "penstock-demo"
            assert (await served.json("/tokenize", {"prompt": "x", "model": name}))["tokens"]
        status, _, text = await served.ask("/v1/completions", {"prompt": "x", "model": "other"})
        assert status == 404
        assert "there are: penstock-demo, gpt-4o, mine/too" in json.loads(text)["error"]["message"]


def test_a_tree_with_two_names_serves_both() -> None:
    tree = stack.start(None, "--served-model-name", "first", "--served-model-name", "second")
    try:
        stack.wait_serving(tree.address, tree)
        with Client(tree.address) as client:
            assert [model.name for model in client.list_models()] == ["first", "second"]
            made = [client.generate("x", model=name, max_new_tokens=2) for name in ("first", "second")]
        assert [one.started.model for one in made] == ["first", "first"]
        assert made[0].text == made[1].text
    finally:
        tree.kill()
