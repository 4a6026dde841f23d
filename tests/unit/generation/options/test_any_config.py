"""Whatever a GenerationConfig holds, it becomes parameters or a refusal that names one of its fields."""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.common.errors import InvalidArgument, NotFound
from penstock.generation.engine.acceptance import most_output_tokens
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.mode_registry import MODES
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import resolve
from penstock.generation.options.validate import validate
from penstock.generation.wire.option_messages import from_options, to_options
from penstock.v1 import config_pb2

ENGINE = EngineConfig(num_blocks=64, block_size=4, max_context_tokens=128)
MODEL = ModelFacts(
    "tiny", 100, 128, has_token_bytes=True, num_layers=6, assistant_model="a",
    max_output_tokens=lambda params, prompt: most_output_tokens(ENGINE, MODES, params, prompt),
)  # fmt: skip
LIMITS = RequestLimits()
# Mostly possible: one impossible value hides everything else.
FLOATS = st.sampled_from([0.5, 0.5, 0.5, 0.25, 0.9, 1.0, 0.0, 1e-9, 1.5, -1.0, 3e38, float("nan"), float("inf")])
INTEGERS = st.sampled_from([1, 2, 3, 4, 4, 5, 6, 7, 50, 64, 99, 0, 100, 2**32 - 1])
TYPES = FieldDescriptor
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    TYPES.TYPE_BOOL: st.booleans(),
    TYPES.TYPE_UINT32: INTEGERS,
    TYPES.TYPE_INT64: INTEGERS | st.just(-(2**63)),
    TYPES.TYPE_UINT64: INTEGERS | st.just(2**64 - 1),
    TYPES.TYPE_FLOAT: FLOATS,
    TYPES.TYPE_DOUBLE: FLOATS,
    TYPES.TYPE_STRING: st.sampled_from(["", "low", "a", "lefthash", "x" * 300]),
    TYPES.TYPE_ENUM: st.sampled_from([1, 2, 3, 0, 9]),
}


def fill(draw: st.DrawFn, message: Message, names: list[str]) -> None:
    """Set the fields `names` of `message`, and all fields of what is in them."""
    for name in names:
        field = message.DESCRIPTOR.fields_by_name[name]
        value = getattr(message, name)
        if name == "logit_bias":
            value.update(draw(st.dictionaries(INTEGERS, FLOATS, max_size=3)))
        elif field.message_type is not None and field.is_repeated:
            for _ in range(draw(st.integers(1, 2))):
                added = value.add()
                fill(draw, added, list(added.DESCRIPTOR.fields_by_name))
        elif field.message_type is not None:
            value.SetInParent()
            inner = list(value.DESCRIPTOR.fields_by_name)
            if "synthid" in inner:
                # Either watermark, not both.
                inner = draw(st.sampled_from([["synthid"], [one for one in inner if one != "synthid"]]))
            fill(draw, value, inner)
        elif field.is_repeated:
            value.extend(draw(st.lists(SCALARS[field.type], min_size=1, max_size=3)))
        else:
            setattr(message, name, draw(SCALARS[field.type]))


@st.composite
def configs(draw: st.DrawFn) -> config_pb2.GenerationConfig:
    """Any GenerationConfig of a few fields."""
    message = config_pb2.GenerationConfig()
    fields = list(message.DESCRIPTOR.fields_by_name)
    fill(draw, message, draw(st.lists(st.sampled_from(fields), unique=True, max_size=6)))
    return message


def test_it_is_resolved_or_refused_by_a_field_of_its_own() -> None:
    modes: Counter[str] = Counter()

    @settings(max_examples=250, deadline=None, derandomize=True)
    @given(configs())
    def check(message: config_pb2.GenerationConfig) -> None:
        modes[outcome_of(message)] += 1

    check()
    # Neither answer is rare.
    assert modes["refused"] > 50
    assert modes.total() - modes["refused"] > 50
    assert len(modes) > 4


def outcome_of(message: config_pb2.GenerationConfig) -> str:
    """The mode that it becomes, or "refused"; either way as promised."""
    try:
        options = to_options(message, LIMITS)
        command = GenerateOptions(prompt_token_ids=[1, 2, 3], options=options)
        validate(command, MODEL, LIMITS)
        resolved = resolve(command, ModelDefaults(eos_token_ids=(9,)), MODEL, LIMITS)
    except (InvalidArgument, NotFound) as error:
        path = (error.field or "").split(".")
        known = {field.name for field in config_pb2.GenerationConfig.DESCRIPTOR.fields}
        assert (path[0], path[1] in known) == ("config", True)
        return "refused"
    params = resolved.params
    assert 0 <= params.min_new_tokens <= params.max_new_tokens
    assert 1 <= params.max_new_tokens <= MODEL.max_context_tokens - 3
    assert params.num_return_sequences <= MODES.most_sequences(params)
    assert MODES.blocks_needed(ENGINE, params, 3, params.max_new_tokens) > 0
    # Accepted options can be written again, as GetModelInfo does, and mean the same.
    assert to_options(from_options(options), LIMITS) == options
    return params.generation_mode.name
