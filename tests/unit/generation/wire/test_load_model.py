"""LoadModel's messages: what they become, and what is refused by its field."""

from __future__ import annotations

import pytest
from penstock.common.errors import InvalidArgument
from penstock.common.options import options_of
from penstock.common.progress import StageProgress
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.load_order import FileSize
from penstock.generation.wire.load_model import from_progress, to_chunk, to_order
from penstock.v1 import model_pb2


def start(**fields: object) -> model_pb2.LoadModelRequest:
    return model_pb2.LoadModelRequest(start=model_pb2.LoadModelStart(**fields))  # type: ignore[arg-type]


def test_every_option_is_a_flag_of_the_service() -> None:
    flags = {bound.name for bound in options_of(GenerationServiceConfig)}
    assert {field.name for field in model_pb2.LoadModelOptions.DESCRIPTOR.fields} <= flags


def test_a_path_and_files() -> None:
    assert to_order(start(path="a", name="b")).path == "a"
    upload = model_pb2.ModelUpload(files=[model_pb2.ModelFile(name="config.json", size_bytes=3)])
    options = model_pb2.LoadModelOptions(dtype="float32", block_size=8, prefix_cache=False)
    order = to_order(start(upload=upload, options=options))
    assert (order.path, order.files) == (None, (FileSize("config.json", 3),))
    assert order.overrides == {"dtype": "float32", "block_size": 8, "prefix_cache": False}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (model_pb2.LoadModelRequest(), "start"),
        (model_pb2.LoadModelRequest(chunk=model_pb2.ModelFileChunk()), "start"),
        (start(name="a"), "start.source"),
        (start(path="a", options=model_pb2.LoadModelOptions(block_size=0)), "start.options.block_size"),
        (start(path="a", options=model_pb2.LoadModelOptions(max_context=1)), "start.options.max_context"),
        (start(path="a", options=model_pb2.LoadModelOptions.FromString(b"\x98\x06\x01")), "start.options"),
    ],
)
def test_what_is_refused(message: model_pb2.LoadModelRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        to_order(message)
    assert refused.value.field == field


def test_chunks() -> None:
    assert to_chunk(model_pb2.LoadModelRequest(chunk=model_pb2.ModelFileChunk(name="a", data=b"b"))) == ("a", b"b")
    with pytest.raises(InvalidArgument):
        to_chunk(start(path="a"))


def test_progress() -> None:
    sent = from_progress(StageProgress("receive", "m", 1, 2, ended=True)).progress
    assert (sent.stage, sent.done_bytes, sent.total_bytes, sent.ended) == ("receive", 1, 2, True)
