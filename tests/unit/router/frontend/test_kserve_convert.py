"""KServe's requests, whatever they hold: a request of Generate, or an error that names the field."""

from __future__ import annotations

import json
import re
from typing import Any, get_type_hints

import pytest
from factories.source_tree import ROOT
from penstock.common.errors import InvalidArgument, trailing_metadata
from penstock.compat.kserve.infer_message import ALIASES, infer_request
from penstock.compat.option_names import ALIASES as OPTION_ALIASES
from penstock.generation.options.table import SECTIONS
from penstock.inference import kserve_pb2
from penstock_client import GenerationOptions

HINTS = {name: spec.kind.hint for rows in SECTIONS.values() for name, spec in rows.items()}
NAMES = sorted({*get_type_hints(GenerationOptions), *ALIASES, "nothing", ""})
VALUES = [
    None,
    True,
    -1,
    2**70,
    1e400,
    0.5,
    "",
    "x",
    "[",
    "[[1, 2], [3]]",
    [],
    [1],
    [[]],
    [["a"]],
    {},
    {"a": 1},
    {"1": "x"},
]


def request(sampling: Any = None, **parameters: str) -> kserve_pb2.ModelInferRequest:
    message = kserve_pb2.ModelInferRequest()
    tensor = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    tensor.contents.bytes_contents.append(b"Hello")
    if sampling is not None:
        tensor = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(
            sampling if isinstance(sampling, bytes) else json.dumps(sampling).encode()
        )
    for name, value in parameters.items():
        message.parameters[name].string_param = value
    return message


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_any_kind_is_taken_or_refused_by_the_options_name(name: str) -> None:
    for value in VALUES:
        fields = {f"sampling_parameters.{name}", "inputs.sampling_parameters", None}
        assert refused_field(request({name: value})) in fields
        if isinstance(value, str):
            assert refused_field(request(**{name: value})) in (f"parameters.{name}", None)


def refused_field(message: kserve_pb2.ModelInferRequest) -> str | None:
    """Field of the error; None for a request that is taken."""
    try:
        infer_request(message)
    except InvalidArgument as error:
        return error.field
    return None


@pytest.mark.parametrize("text", [b"\xff", b"[]", b"1", b"{", b"nul", b"[" * 100_000])
def test_sampling_parameters_that_are_no_object_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgument) as caught:
        infer_request(request(text))
    assert caught.value.field == "inputs.sampling_parameters"


@pytest.mark.parametrize("raw", [b"", b"\0", b"\5\0\0\0Hell", b"\5\0\0\0Hello!", b"\1\0\0\0\xff"])
def test_raw_contents_that_are_no_text_are_refused(raw: bytes) -> None:
    message = request()
    message.inputs[0].ClearField("contents")
    message.raw_input_contents.append(raw)
    with pytest.raises(InvalidArgument) as caught:
        infer_request(message)
    assert caught.value.field == "inputs.text_input"


@pytest.mark.parametrize(
    ("value", "expected"), [("END", ["END"]), ("[", ["["]), ('["a", "b"]', ["a", "b"]), ("", [""])]
)
def test_a_parameter_is_a_text_or_the_json_of_a_list(value: str, expected: list[str]) -> None:
    assert list(infer_request(request(stop=value)).request.stop.stop_strings) == expected


def test_an_option_may_be_there_once() -> None:
    with pytest.raises(InvalidArgument) as caught:
        infer_request(request({"max_tokens": 3}, max_new_tokens="4"))
    assert caught.value.field == "parameters.max_new_tokens"


def test_shared_memory_is_refused_by_name() -> None:
    message = request()
    message.inputs[0].parameters["shared_memory_region"].string_param = "mine"
    with pytest.raises(InvalidArgument) as caught:
        infer_request(message)
    assert caught.value.field == "inputs.text_input.parameters"


@pytest.mark.parametrize("name", ["output_scores", "top_logprobs", "return_token_ids", "echo", "model", "config"])
def test_options_without_an_output_here_are_refused(name: str) -> None:
    assert refused_field(request({name: True})) == f"sampling_parameters.{name}"


@pytest.mark.parametrize("name", ["\\ud800", "x" * 100_000, "\u00e9" * 100_000], ids=["half", "long", "long and wide"])
def test_a_name_that_no_message_holds_is_refused_by_one_that_trailers_hold(name: str) -> None:
    message = request()
    tensor = message.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(f'{{"{name}": 1}}'.encode())
    with pytest.raises(InvalidArgument) as caught:
        infer_request(message)
    (_, details), *_ = trailing_metadata(caught.value)
    # Bytes of the status, percent-encoded, and of its details in base64: peers take 8 KiB.
    assert 3 * len(caught.value.message.encode()) + 4 * len(details) // 3 < 8 << 10
    assert caught.value.field is not None
    assert caught.value.field.startswith("sampling_parameters.")


@pytest.mark.parametrize(("name", "alias"), [(name, alias) for name, some in OPTION_ALIASES.items() for alias in some])
def test_every_alias_of_the_table_is_the_option(name: str, alias: str) -> None:
    value = {"str | Sequence[str]": "x", "bool": True, "float": 0.5}.get(HINTS[name], 2)
    ours, theirs = infer_request(request({name: value})), infer_request(request({alias: value}))
    assert ours.request == theirs.request != infer_request(request()).request


def test_the_page_names_every_other_name_of_an_option() -> None:
    _, _, section = (ROOT / "docs" / "guide" / "kserve.md").read_text(encoding="utf-8").partition("\n## Options\n")
    told = set(re.findall(r"`(\w+)`", section.partition("\n## ")[0]))
    assert set(ALIASES) - told == set()
