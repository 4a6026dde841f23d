"""A hundred documents under twenty schemas, all valid: two random models and the demo model, at high temperature."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio
from factories.engine.grammars import EOS, ids_of, text_tokenizer
from factories.engine.schemas import SCHEMAS
from factories.servers.generation import Client, generation_service, request, text_checkpoint
from penstock.common.checkpoint import demo_folder
from penstock.v1 import common_pb2, config_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMPLETE = {common_pb2.FINISH_REASON_CONSTRAINT_DONE, common_pb2.FINISH_REASON_STOP_EOS}
# Model -> documents of each schema.
DOCUMENTS = {"random llama": 2, "random qwen2": 1, "demo": 2}


def folder_of(model: str, where: Path) -> Path:
    if model == "demo":
        return demo_folder()
    return text_checkpoint(where, family=model.removeprefix("random "), seed=len(model))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(DOCUMENTS))
async def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Client, int]]:
    folder = folder_of(request.param, tmp_path_factory.mktemp("model"))
    async with generation_service(folder) as running:
        yield running, DOCUMENTS[request.param]


async def test_there_are_a_hundred_documents_of_twenty_schemas() -> None:
    assert len(SCHEMAS) == 20
    assert len(SCHEMAS) * sum(DOCUMENTS.values()) == 100


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", SCHEMAS)
async def test_every_document_is_complete_and_valid(service: tuple[Client, int], name: str) -> None:
    client, count = service
    schema = SCHEMAS[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    # Not `FormatChecker()`, whose `time` is draft 3's.
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    # The white space of a model that knows no language would be most of its documents.
    text = json.dumps({"x-guidance": {"whitespace_pattern": " "}, **schema})
    options = {"max_new_tokens": 600, "do_sample": True, "temperature": 1.5, "top_k": 0, "num_return_sequences": count}
    outcome = await client.generate(
        request(
            ids_of("Write a document."),
            config=options,
            stop={"ignore_eos": False},
            constraint=config_pb2.Constraint(json_schema=text),
            eos_token_ids=EOS,
            seed=11,
        )
    )
    assert outcome.error is None
    assert len(outcome.finished.sequences) == count
    for index, end in enumerate(outcome.finished.sequences):
        document = text_tokenizer().decode(outcome.ids(index), skip_special_tokens=True)
        assert end.finish_reason in COMPLETE, document
        validator.validate(json.loads(document))
