"""inputs_embeds on their way to the model's rows: the same bits as torch's conversion, or a refusal."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.generation.core.prompt_embeds import PromptEmbeds
from penstock.generation.core.tensors import TensorData
from penstock.generation.wire import convert
from penstock.generation.wire.embeds_intake import EmbedsIntake, to_prompt_embeds
from penstock.v1 import common_pb2, generation_pb2

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PAIRS = pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))


def tensor_data(rows: torch.Tensor) -> TensorData:
    name = str(rows.dtype).removeprefix("torch.")
    return TensorData(name, tuple(rows.shape), rows.contiguous().view(torch.uint8).numpy().tobytes())


def converted(rows: torch.Tensor, target: str) -> torch.Tensor:
    made = to_prompt_embeds(tensor_data(rows), target, 4, 0)
    assert made.num_tokens == rows.shape[0]
    return torch.frombuffer(made.data, dtype=DTYPES[target]).view(rows.shape)


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int32 if rows.dtype is torch.float32 else torch.int16)


@PAIRS
def test_every_number_becomes_what_torch_makes_of_it(source: str, target: str) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if source == "float32":
        # Halves of the last place that bfloat16 keeps, and their neighbours: ties and near ties of every number.
        ends = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x2FFF], dtype=torch.int32)
        values = ((patterns[:, None] << 16) | ends).flatten().view(torch.float32)
    else:
        values = patterns.to(torch.int16).view(DTYPES[source])
    expected = values.to(DTYPES[target])
    kept = values.isfinite() & expected.isfinite()
    values, expected = values[kept].view(1, -1), expected[kept].view(1, -1)
    assert torch.equal(bits(converted(values, target)), bits(expected))


@PAIRS
@given(st.data())
def test_what_is_not_finite_in_the_models_type_is_refused(source: str, target: str, data: Any) -> None:
    bad = [float("nan"), float("inf"), float("-inf")]
    largest = {"float32": 3.4e38, "float16": 65504.0, "bfloat16": 3.38e38}
    if largest[source] > 70_000 and target == "float16":
        bad += [70_000.0, -1e30]
    if (source, target) == ("float32", "bfloat16"):
        bad += [3.4e38]
    rows = torch.zeros(3, 5, dtype=DTYPES[source])
    rows[data.draw(st.integers(0, 2)), data.draw(st.integers(0, 4))] = data.draw(st.sampled_from(bad))
    with pytest.raises(InvalidArgument) as refused:
        to_prompt_embeds(tensor_data(rows), target, 4, 0)
    assert refused.value.field == "inputs_embeds"


def test_a_nan_of_any_bits_is_refused() -> None:
    values = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], dtype=np.uint32)
    for value in values:
        data = TensorData("float32", (1, 1), value.tobytes())
        for target in DTYPES:
            with pytest.raises(InvalidArgument):
                to_prompt_embeds(data, target, 4, 0)


def test_each_block_has_a_digest_of_its_rows() -> None:
    rows = torch.randn(10, 3)
    made = to_prompt_embeds(tensor_data(rows), "float32", 4, 10)
    blocks = [rows[:4], rows[4:8], rows[8:]]
    assert made.digests == tuple(hashlib.sha256(block.numpy().tobytes()).digest() for block in blocks)
    assert made.num_placeholders == 10


def content(rows: torch.Tensor, index: int, later_ids: list[int]) -> bytes:
    made: PromptEmbeds = to_prompt_embeds(tensor_data(rows), "float32", 4, 0)
    return made.block_content(index, later_ids)


def test_contents_of_blocks_are_equal_only_where_rows_and_later_ids_are() -> None:
    rows = torch.randn(6, 3)
    assert content(rows, 0, []) == content(rows[:4], 0, [])
    assert content(rows, 1, [7, 8]) == content(torch.cat([rows[:4] + 1, rows[4:]]), 1, [7, 8])
    # One row less and one id more, other ids, other rows: no content of another kind has the same length.
    contents = [content(rows, 1, [7, 8]), content(rows, 1, [7, 9]), content(rows[:5], 1, [1, 7, 8])]
    contents += [content(rows, 0, []), content(rows.flip(0), 0, []), bytes(16)]
    assert len(set(contents)) == len(contents)
    assert all(len(one) % 4 for one in contents[:-1])


def message(**fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(prompt_token_ids=[1], inputs_embeds=common_pb2.Tensor(**fields))


def test_a_tensor_is_carried_as_it_was_sent() -> None:
    sent = message(dtype=common_pb2.D_TYPE_BFLOAT16, shape=[2, 3], data=b"abcdefghijkl")
    sent.inputs_embeds_before_ids = True
    options = convert.to_generate_options(sent)
    assert options.inputs_embeds == TensorData("bfloat16", (2, 3), b"abcdefghijkl")
    assert (options.num_prompt_tokens, options.num_placeholders) == (3, 2)
    sent.inputs_embeds_before_ids = False
    options = convert.to_generate_options(sent)
    assert (options.num_prompt_tokens, options.num_placeholders) == (2, 1)
    assert convert.to_generate_options(generation_pb2.GenerateRequest(prompt_token_ids=[1])).inputs_embeds is None


def test_a_shape_of_millions_of_dimensions_is_not_copied() -> None:
    options = convert.to_generate_options(message(dtype=99, shape=[1] * 1_000_000))
    assert options.inputs_embeds is not None
    assert options.inputs_embeds.dtype == ""
    assert len(options.inputs_embeds.shape) < 10


def intake(most_bytes: int) -> EmbedsIntake:
    return EmbedsIntake("float32", 4, most_bytes, 0.5)


def test_room_counts_rows_that_wait_and_rows_to_come_at_their_final_size() -> None:
    small, large = tensor_data(torch.zeros(5, 4)), tensor_data(torch.zeros(11, 4, dtype=torch.float16))
    made = intake(160)
    with made.room(small, 0), made.room(small, 0):
        # 80 bytes each.
        with pytest.raises(ResourceExhausted, match="160 bytes of --max-live-embeds-bytes 160"), made.room(small, 0):
            raise AssertionError("there is no room")
        with made.room(None, 0):
            pass
    with made.room(small, 80):
        pass
    # 88 bytes on the wire, and 176 in the model's dtype.
    with pytest.raises(ResourceExhausted) as refused, made.room(large, 1):
        raise AssertionError("there is no room")
    assert (refused.value.reason, refused.value.retry_after_seconds) == ("QUEUE_FULL", 0.5)
    with made.room(large, 0):
        pass


async def test_a_caller_that_leaves_in_the_middle_gives_its_room_back() -> None:
    made = intake(0)
    tensor = tensor_data(torch.zeros(1000, 400))

    async def take() -> None:
        with made.room(tensor, 0):
            await made.convert(tensor, 0)

    for _ in range(3):
        task = asyncio.create_task(take())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await take()
