"""Keyword options of the Python client: transformers' names and types in, the wire's fields out."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import json_format
from penstock.v1 import common_pb2, config_pb2, text_pb2
from penstock_client import GenerationOptions, InvalidArgument, PromptOptions, Timings, Usage
from penstock_client._options import chat_request, check_many, check_options, generate_request
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig


def request_of(**options: Any) -> text_pb2.GenerateTextRequest:
    return generate_request("Hello", options)


def as_dict(message: Any) -> dict[str, Any]:
    """Fields by their own names, floats as they were written."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


CONFIG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_new_tokens": 5, "min_length": 0}, {"max_new_tokens": 5, "min_length": 0}),
    ({"num_beams": 4, "length_penalty": 0.5}, {"num_beams": 4, "length_penalty": 0.5}),
    ({"early_stopping": True}, {"early_stopping": "EARLY_STOPPING_TRUE"}),
    ({"early_stopping": False}, {"early_stopping": "EARLY_STOPPING_FALSE"}),
    ({"early_stopping": "never"}, {"early_stopping": "EARLY_STOPPING_NEVER"}),
    (
        {"num_assistant_tokens_schedule": "heuristic"},
        {"num_assistant_tokens_schedule": "ASSISTANT_TOKENS_SCHEDULE_HEURISTIC"},
    ),
    ({"dola_layers": "low"}, {"dola_layers": {"preset": "low"}}),
    ({"dola_layers": [2, 4]}, {"dola_layers": {"indices": {"indices": [2, 4]}}}),
    ({"dola_layers": []}, {"dola_layers": {"indices": {}}}),
    ({"negative_prompt": "no"}, {"negative_prompt_text": "no"}),
    ({"negative_prompt": [1, 2]}, {"negative_prompt_ids": {"ids": [1, 2]}}),
    ({"negative_prompt_ids": [1]}, {"negative_prompt_ids": {"ids": [1]}}),
    ({"bad_words_ids": [[1], [2, 3]]}, {"bad_words_ids": [{"ids": [1]}, {"ids": [2, 3]}]}),
    (
        {"force_words_ids": [[1, 2], [[3], [4, 5]]]},
        {
            "force_words_ids": [
                {"alternatives": [{"ids": [1, 2]}]},
                {"alternatives": [{"ids": [3]}, {"ids": [4, 5]}]},
            ]
        },
    ),
    (
        {"constraints": [[1, 2], [[3], [4]]]},
        {
            "constraints": [
                {"phrasal": {"ids": [1, 2]}},
                {"disjunctive": {"alternatives": [{"ids": [3]}, {"ids": [4]}]}},
            ]
        },
    ),
    ({"forced_eos_token_id": 7}, {"forced_eos_token_id": [7]}),
    ({"forced_eos_token_id": [7, 8]}, {"forced_eos_token_id": [7, 8]}),
    (
        {"exponential_decay_length_penalty": (5, 1.5)},
        {"exponential_decay_length_penalty": {"start_index": 5, "decay_factor": 1.5}},
    ),
    ({"suppress_tokens": (1, 2)}, {"suppress_tokens": [1, 2]}),
    (
        {"sequence_bias": {(1, 2): -0.5, (3,): 2}},
        {"sequence_bias": [{"token_ids": [1, 2], "bias": -0.5}, {"token_ids": [3], "bias": 2.0}]},
    ),
    ({"sequence_bias": [[[1, 2], -0.5]]}, {"sequence_bias": [{"token_ids": [1, 2], "bias": -0.5}]}),
    (
        {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
        {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    ),
    (
        {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5)},
        {
            "watermarking_config": {
                "greenlist_ratio": 0.5,
                "bias": 2.0,
                "hashing_key": "15485863",
                "seeding_scheme": "lefthash",
                "context_width": 1,
            }
        },
    ),
    (
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=5, keys=[7, -8])},
        {
            "watermarking_config": {
                "synthid": {
                    "ngram_len": 5,
                    "keys": ["7", "-8"],
                    "context_history_size": 1024,
                    "sampling_table_seed": "0",
                    "sampling_table_size": 65536,
                    "skip_first_ngram_calls": False,
                }
            }
        },
    ),
    ({"logits_processor": "one"}, {"logits_processor": [{"name": "one"}]}),
    (
        {"stopping_criteria": ["one", ("two", {"of": 3})]},
        {"stopping_criteria": [{"name": "one"}, {"name": "two", "parameters": '{"of": 3}'}]},
    ),
    (
        {"logits_processor": {"one": {}, "two": {"of": 3}}},
        {"logits_processor": [{"name": "one"}, {"name": "two", "parameters": '{"of": 3}'}]},
    ),
    ({"logit_bias": {3: -1.5}}, {"logit_bias": {"3": -1.5}}),
    ({"allowed_token_ids": range(3)}, {"allowed_token_ids": [0, 1, 2]}),
    ({"allowed_token_trie": [[1, 2], [3]]}, {"allowed_token_trie": {"sequences": [{"ids": [1, 2]}, {"ids": [3]}]}}),
    ({"temperature": 0.0, "top_k": 0, "do_sample": False}, {"temperature": 0.0, "top_k": 0, "do_sample": False}),
    ({"temperature": None}, {}),
]


@pytest.mark.parametrize(("options", "config"), CONFIG, ids=lambda value: str(value)[:50])
def test_a_value_of_transformers_becomes_the_wires(options: dict[str, Any], config: dict[str, Any]) -> None:
    assert as_dict(request_of(**options).config) == config


def test_transformers_own_constraints_are_taken() -> None:
    class PhrasalConstraint:
        token_ids = (1, 2)

    assert as_dict(request_of(constraints=[PhrasalConstraint()]).config) == {
        "constraints": [{"phrasal": {"ids": [1, 2]}}]
    }


def test_every_field_has_a_keyword_and_every_keyword_a_field() -> None:
    keywords = set(GenerationOptions.__annotations__)
    for message, renamed in (
        (config_pb2.GenerationConfig, {"negative_prompt_text"}),
        (config_pb2.StopConfig, set()),
        (config_pb2.OutputConfig, set()),
        (config_pb2.Constraint, set()),
    ):
        fields = {field.name for field in message.DESCRIPTOR.fields}
        assert fields - keywords == renamed
        keywords -= fields
    assert keywords == {
        "negative_prompt", "config", "model", "adapter", "request_id", "session_id", "priority", "cache_salt",
        "add_special_tokens", "parse_special_tokens", "suffix", "add_generation_prompt", "continue_final_message",
        "inputs_embeds", "inputs_embeds_before_ids",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "constraint"),
    [
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"json_object": True}, {"json_object": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "x"'}, {"grammar": 'start: "x"'}),
        ({"choice": ["yes", "no"]}, {"choice": {"values": ["yes", "no"]}}),
    ],
)
def test_structured_output_is_a_keyword(options: dict[str, Any], constraint: dict[str, Any]) -> None:
    assert as_dict(request_of(**options).constraint) == constraint
    assert as_dict(chat_request("Hello", (), (), None, options).constraint) == constraint
    assert not request_of(regex=None).HasField("constraint")


def test_a_schema_may_be_a_mapping() -> None:
    schema = {"type": "object", "properties": {"näme": {"type": "string"}}}
    assert json.loads(request_of(json_schema=schema).constraint.json_schema) == schema


def test_two_kinds_of_structured_output_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="'regex' and 'choice'"):
        request_of(regex="a", choice=["b"])


@pytest.mark.parametrize(
    ("error", "name", "value"),
    [
        (ValueError, "early_stopping", "always"),
        (ValueError, "early_stopping", 1),
        (ValueError, "num_assistant_tokens_schedule", "sometimes"),
        (ValueError, "bad_words_ids", []),
        (ValueError, "force_words_ids", []),
        (ValueError, "sequence_bias", {}),
        (ValueError, "max_new_tokens", -1),
        (ValueError, "exponential_decay_length_penalty", (1,)),
        (TypeError, "num_beams", "four"),
        (TypeError, "bad_words_ids", ["word"]),
        (TypeError, "bad_words_ids", [1]),
        (TypeError, "suppress_tokens", ["x"]),
        (ValueError, "watermarking_config", {"ngram_len": 5}),
        (TypeError, "logits_processor", [1]),
        (TypeError, "logits_processor", {"one": 5}),
        (ValueError, "stopping_criteria", {"one": {"of": float("nan")}}),
        (ValueError, "watermarking_config", {"ngram_len": 5, "keys": [1], "debug_mode": True}),
        (TypeError, "choice", "yes"),
        (TypeError, "num_beeps", 3),
    ],
)
def test_a_wrong_option_is_named(error: type[Exception], name: str, value: Any) -> None:
    with pytest.raises(error, match=name):
        request_of(**{name: value})


def test_outputs_and_stops() -> None:
    request = request_of(
        output_scores=True, scores_top_k=5, tensor_steps=[0, 2], stop_strings="end", stop_token_ids=[1, [2, 3]]
    )
    assert as_dict(request.output) == {"output_scores": True, "scores_top_k": 5, "tensor_steps": [0, 2]}
    assert as_dict(request.stop) == {"stop_strings": ["end"], "stop_token_ids": [{"ids": [1]}, {"ids": [2, 3]}]}


def test_keywords_go_over_the_config_that_is_given() -> None:
    config = config_pb2.GenerationConfig(top_k=5, top_p=0.5)
    assert as_dict(request_of(config=config, top_k=3).config) == {"top_k": 3, "top_p": 0.5}


def test_options_of_one_kind_of_prompt_only() -> None:
    assert request_of(add_special_tokens=False).HasField("add_special_tokens")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    chat = chat_request("Hello", (), (), None, options)
    assert (chat.HasField("add_generation_prompt"), chat.continue_final_message) == (True, True)
    check_options(continue_final_message=True)
    check_options(add_special_tokens=False)
    with pytest.raises(TypeError, match="'continue_final_message': is for a conversation only"):
        request_of(continue_final_message=True)
    with pytest.raises(TypeError, match="'add_special_tokens': is for a text or ids only"):
        chat_request("Hello", (), (), None, {"add_special_tokens": True})


@pytest.mark.parametrize("kind", [text_pb2.GenerateTextRequest, text_pb2.ChatRequest])
def test_every_scalar_of_a_request_is_an_option(kind: Any) -> None:
    scalars = {field.name for field in kind.DESCRIPTOR.fields if field.message_type is None}
    assert scalars - {"text"} <= PromptOptions.__optional_keys__


@pytest.mark.parametrize(
    "options",
    [
        {"stop_token_ids": 1.5},
        {"top_logprobs": "x"},
        {"tensor_steps": 3},
        {"priority": "high"},
        {"regex": 5},
        {"seed": -(2**63) - 1},
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_the_options_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises((TypeError, ValueError), match=f"option '{name}'"):
        request_of(**options)


def test_one_stop_token_is_no_list() -> None:
    assert as_dict(request_of(stop_token_ids=5))["stop"] == {"stop_token_ids": [{"ids": [5]}]}


def test_a_logit_bias_may_have_openais_keys() -> None:
    """JSON, and so `penstock complete --option`, knows text as keys only."""
    assert request_of(logit_bias={"5": 1.0, 6: -1.0}).config.logit_bias == {5: 1.0, 6: -1.0}
    with pytest.raises(ValueError, match="option 'logit_bias'"):
        request_of(logit_bias={"five": 1.0})


def test_numpys_numbers_are_ids() -> None:
    five = np.int64(5)
    config = request_of(force_words_ids=[[five]], forced_eos_token_id=five, stop_token_ids=[five]).config
    assert [list(entry.ids) for entry in config.force_words_ids[0].alternatives] == [[5]]
    assert list(config.forced_eos_token_id) == [5]
    assert request_of(stop_token_ids=[five]) == request_of(stop_token_ids=five) == request_of(stop_token_ids=[5])


def chat_with(content: Any) -> text_pb2.ChatRequest:
    return chat_request([{"role": "system", "content": "Hi"}, {"role": "user", "content": content}], (), (), None, {})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "What is "}, {"type": "text", "text": "Penstock?"}], "What is Penstock?"),
        (({"type": "input_text", "text": "a"}, "b"), "ab"),
        ([], ""),
        (None, ""),
        ("plain", "plain"),
    ],
)
def test_parts_of_a_content_are_joined(content: Any, text: str) -> None:
    assert chat_with(content).messages[1].content == text


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "content[1]", "image_url parts"),
        ([{"type": "input_audio", "input_audio": {}}], "content[0]", "input_audio parts are not supported"),
        ([{"type": "secret words"}], "content[0]", "the type of a part is unknown"),
        ([{"type": "text"}], "content[0].text", "must be a text"),
        ([7], "content[0]", "must be a text or a mapping"),
        (7, "content", "a list of parts"),
        ({"type": "text", "text": "a"}, "content", "a list of parts"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_place(content: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_with(content)
    assert caught.value.field == f"messages[1].{field}"
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_usage_and_timings_read_as_lines() -> None:
    usage = Usage.of(common_pb2.Usage(prompt_tokens=12, completion_tokens=30, cached_tokens=4, accepted_draft_tokens=0))
    assert str(usage) == "12 prompt tokens (4 cached), 30 completion tokens"
    assert usage.total_tokens == 42
    assert repr(usage).startswith("Usage(prompt_tokens=12, completion_tokens=30, cached_tokens=4,")
    assert "proto" not in repr(usage)
    timings = Timings.of(common_pb2.StageTimings(queue_seconds=0.0123, total_seconds=1.25))
    assert str(timings) == "queue 12.3 ms, total 1.25 s"
    assert (timings.queue_seconds, timings.prefill_seconds) == (0.0123, None)
    assert timings.proto.HasField("queue_seconds")


def test_every_field_of_usage_and_timings_has_its_place() -> None:
    for kind, message in ((Usage, common_pb2.Usage), (Timings, common_pb2.StageTimings)):
        assert [each.name for each in fields(kind)] == [*message.DESCRIPTOR.fields_by_name, "proto"]


ROWS = np.arange(6, dtype=np.float32).reshape(2, 3) / 7 - 0.4


@pytest.mark.parametrize(
    ("values", "dtype", "data"),
    [
        (ROWS, "D_TYPE_FLOAT32", ROWS.tobytes()),
        (ROWS[None], "D_TYPE_FLOAT32", ROWS.tobytes()),
        (np.asfortranarray(ROWS), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (np.repeat(ROWS, 2, axis=0)[::2], "D_TYPE_FLOAT32", ROWS.tobytes()),
        (ROWS.astype(">f4"), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (ROWS.astype(np.float64), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (ROWS.astype(np.float16), "D_TYPE_FLOAT16", ROWS.astype(np.float16).tobytes()),
        (ROWS.tolist(), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (tuple(map(tuple, ROWS.tolist())), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (list(ROWS), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS, requires_grad=True), "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS).double()[None], "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS.T.copy()).T, "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS).repeat(1, 2)[:, :3], "D_TYPE_FLOAT32", ROWS.tobytes()),
        (torch.tensor(ROWS).half(), "D_TYPE_FLOAT16", ROWS.astype(np.float16).tobytes()),
        (
            torch.tensor(ROWS).bfloat16(),
            "D_TYPE_BFLOAT16",
            torch.tensor(ROWS).bfloat16().view(torch.int16).numpy().tobytes(),
        ),
        (
            common_pb2.Tensor(dtype=common_pb2.D_TYPE_FLOAT16, shape=[2, 3], data=b"twelve bytes"),
            "D_TYPE_FLOAT16",
            b"twelve bytes",
        ),
    ],
)
def test_embeddings_of_anyones_kind_become_a_tensor(values: Any, dtype: str, data: bytes) -> None:
    tensor = generate_request("", {"inputs_embeds": values}).inputs_embeds
    assert common_pb2.DType.Name(tensor.dtype) == dtype
    assert (list(tensor.shape), tensor.data) == ([2, 3], data)


def test_an_empty_text_beside_embeddings_is_no_prompt() -> None:
    assert generate_request("", {"inputs_embeds": ROWS}).WhichOneof("prompt") is None
    assert generate_request("", {"inputs_embeds": None}).WhichOneof("prompt") == "text"
    assert generate_request("x", {"inputs_embeds": ROWS}).text == "x"
    request = generate_request([1, 2], {"inputs_embeds": ROWS, "inputs_embeds_before_ids": True})
    assert (list(request.token_ids.ids), request.inputs_embeds_before_ids) == ([1, 2], True)
    assert generate_request([], {"inputs_embeds": ROWS}).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("error", "values"),
    [
        (ValueError, ROWS[0]),
        (ValueError, np.stack([ROWS, ROWS])),
        (ValueError, torch.zeros(())),
        (ValueError, [[1.0], [1.0, 2.0]]),
        (TypeError, ROWS.astype(np.int64)),
        (TypeError, torch.zeros(2, 3, dtype=torch.int64)),
        (TypeError, ROWS.astype(np.complex64)),
        (TypeError, [["a"]]),
        (TypeError, 5),
    ],
)
def test_embeddings_of_another_form_are_refused_by_name(error: type[Exception], values: Any) -> None:
    with pytest.raises(error, match="inputs_embeds"):
        generate_request("", {"inputs_embeds": values})


def test_embeddings_are_one_prompts_alone_and_no_conversations() -> None:
    with pytest.raises(ValueError, match="'inputs_embeds' is for one prompt"):
        check_many(["a", "b"], {"inputs_embeds": ROWS})
    with pytest.raises(TypeError, match="'inputs_embeds': is for a text or ids only"):
        chat_request("Hello", (), (), None, {"inputs_embeds": ROWS})
