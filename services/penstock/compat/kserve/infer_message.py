"""Conversion of KServe's messages: requests to GenerateTextRequest, answers to tensors. Pure, no I/O.

Inputs and outputs are those of vLLM's backend for Triton; parameters are options by their names here. Errors name
KServe's fields, e.g. `inputs.text_input`, `parameters.temperature`, `sampling_parameters.top_p`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from penstock_client._options import GenerationOptions, check_options, generate_request

from penstock.common.errors import InvalidArgument, NotFound
from penstock.compat.option_names import ALIASES as OPTION_ALIASES
from penstock.inference import kserve_pb2
from penstock.v1 import common_pb2, generation_pb2, text_pb2

# The version of every model: a model is whatever its backends have loaded.
VERSION = "1"
PLATFORM = "penstock"
TEXT_INPUT, TEXT_OUTPUT = "text_input", "text_output"
STREAM, SAMPLING = "stream", "sampling_parameters"
EXCLUDE_INPUT = "exclude_input_in_output"
# Inputs beside the text: name -> type.
OPTIONAL_INPUTS = {
    STREAM: "BOOL",
    SAMPLING: "BYTES",
    EXCLUDE_INPUT: "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
# Outputs that a request asks for in `outputs` or by the input `return_…`: name -> type.
EXTRA_OUTPUTS = {
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# Names that callers of other servers use -> ours.
ALIASES = {"lora_name": "adapter", **{alias: name for name, aliases in OPTION_ALIASES.items() for alias in aliases}}
# Parameters that Triton's clients set by themselves, without a meaning here.
_IGNORED = frozenset({"sequence_id", "sequence_start", "sequence_end", "priority_level", "timeout"})
FINAL, EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"
# Options without a form in JSON, options that KServe's own fields set, and options with results that no output holds.
_NOT_OPTIONS = frozenset({"config", "inputs_embeds", "inputs_embeds_before_ids", "model", "echo", "return_token_ids"})
_NOT_OPTIONS |= {"top_logprobs", "prompt_logprobs", "tensor_steps", "scores_top_k"}
_NOT_OPTIONS |= {f"output_{name}" for name in ("scores", "logits", "hidden_states", "attentions")}
_OPTIONS = frozenset({*get_type_hints(GenerationOptions)} - {"add_generation_prompt", "continue_final_message"})
_TEXT_OPTIONS = frozenset({"json_schema", "regex", "grammar", "negative_prompt", "negative_prompt_text"})
# Errors of the conversion for a value that an option cannot have.
_REFUSALS = (TypeError, ValueError, OverflowError)
_SIZE = struct.Struct("<I")
_FORMATS = {"FP32": "f", "UINT32": "I"}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A parsed ModelInferRequest."""

    request: text_pb2.GenerateTextRequest
    id: str
    model: str
    streams: bool
    # Tensors travel in raw_output_contents, as they did in the request.
    is_raw: bool
    # Names of EXTRA_OUTPUTS.
    extras: tuple[str, ...]


def infer_request(message: kserve_pb2.ModelInferRequest) -> InferRequest:
    """Parse a request. Raises InvalidArgument naming the field, NotFound for a version that no model has."""
    check_version("model_version", message.model_version)
    inputs = _inputs(message)
    if TEXT_INPUT not in inputs:
        raise InvalidArgument("inputs", f"must have {TEXT_INPUT}, a tensor of BYTES of shape [1]")
    parameters = {name: _plain(name, value) for name, value in sorted(message.parameters.items())}
    streams = inputs.get(STREAM, parameters.pop(STREAM, False))
    if not isinstance(streams, bool):
        raise InvalidArgument(f"parameters.{STREAM}", "must be true or false")
    parameters.pop(EMPTY_FINAL, None)
    options = {name: value for name, value in parameters.items() if name not in _IGNORED}
    request = _text_request(inputs[TEXT_INPUT], _sampling(inputs), options)
    request.model = message.model_name
    if inputs.get(EXCLUDE_INPUT) is False:
        request.output.echo = True
    return InferRequest(
        request, message.id, message.model_name, streams, bool(message.raw_input_contents), _extras(message, inputs)
    )


def check_version(field: str, version: str) -> None:
    """Refuse a version that no model has. Raises NotFound."""
    if version not in ("", VERSION):
        raise NotFound(f"{field}: {VERSION} is the only version of every model", reason="MODEL_NOT_FOUND", field=field)


def _inputs(message: kserve_pb2.ModelInferRequest) -> dict[str, Any]:
    """Values of the inputs: each tensor has one element."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidArgument("raw_input_contents", f"must have an entry for each of the {len(message.inputs)} inputs")
    values: dict[str, Any] = {}
    for number, tensor in enumerate(message.inputs):
        known = "BYTES" if tensor.name == TEXT_INPUT else OPTIONAL_INPUTS.get(tensor.name)
        if known is None:
            raise InvalidArgument(f"inputs[{number}].name", f"must be {TEXT_INPUT} or {', '.join(OPTIONAL_INPUTS)}")
        field = f"inputs.{tensor.name}"
        if tensor.name in values:
            raise InvalidArgument(field, "must occur once")
        if any("shared_memory" in name for name in tensor.parameters):
            raise InvalidArgument(f"{field}.parameters", "shared memory is not supported: send the tensor's contents")
        if tensor.datatype != known:
            raise InvalidArgument(f"{field}.datatype", f"must be {known}")
        if any(size < 1 for size in tensor.shape) or math.prod(tensor.shape) != 1:
            raise InvalidArgument(f"{field}.shape", "must be [1]: one text a request, send several requests instead")
        values[tensor.name] = _element(tensor.contents, raw[number] if raw else None, known, field)
    return values


def _element(contents: kserve_pb2.InferTensorContents, raw: bytes | None, datatype: str, field: str) -> Any:
    if datatype == "BOOL":
        if raw is not None:
            if raw not in (b"\0", b"\1"):
                raise InvalidArgument(field, "must be one byte, 0 or 1")
            return raw == b"\1"
        if len(contents.bool_contents) != 1:
            raise InvalidArgument(f"{field}.contents", "must have one of bool_contents")
        return contents.bool_contents[0]
    if raw is None:
        if len(contents.bytes_contents) != 1:
            raise InvalidArgument(f"{field}.contents", "must have one of bytes_contents")
        data = contents.bytes_contents[0]
    elif len(raw) < _SIZE.size or _SIZE.unpack_from(raw)[0] != len(raw) - _SIZE.size:
        raise InvalidArgument(field, "must be a length in 4 bytes, followed by that number of bytes")
    else:
        data = raw[_SIZE.size :]
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(field, "must be UTF-8") from None


def _plain(name: str, value: kserve_pb2.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(f"parameters.{name}", "must have a value")
    return getattr(value, kind)


def _sampling(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if SAMPLING not in inputs:
        return {}
    try:
        values = json.loads(inputs[SAMPLING] or "{}")
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidArgument(f"inputs.{SAMPLING}", "must be a JSON object of options")
    return values


def _text_request(
    text: str, sampling: Mapping[str, Any], parameters: Mapping[str, Any]
) -> text_pb2.GenerateTextRequest:
    """Make the request from options of either kind; a name may occur once."""
    options: dict[str, Any] = {}
    fields: dict[str, str] = {}
    for where, values in ((SAMPLING, sampling), ("parameters", parameters)):
        for given, value in values.items():
            name, field = ALIASES.get(given, given), f"{where}.{given}"
            if name in fields:
                raise InvalidArgument(field, f"is the same option as {fields[name]}")
            if name in _NOT_OPTIONS:
                raise InvalidArgument(field, "cannot be set here")
            # Checked before anything is made of it: there may be very many.
            if name not in _OPTIONS:
                raise InvalidArgument(field, "is not an option")
            fields[name], options[name] = field, _fitting(name, value)
    try:
        return generate_request(text, options)
    except _REFUSALS as error:
        raise _wrong_option(options, fields) from error


def _fitting(name: str, value: Any) -> Any:
    """Return the value in the option's type: a parameter's text may be the JSON of a number or a list."""
    if not isinstance(value, str) or name in _TEXT_OPTIONS:
        return value
    if _refusal(name, value) is None and value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _refusal(name: str, value: Any) -> Exception | None:
    """Return the error of a single option."""
    try:
        check_options(**{name: value})
    except _REFUSALS as error:
        return error
    return None


def _wrong_option(options: Mapping[str, Any], fields: Mapping[str, str]) -> InvalidArgument:
    """Return the error of the first option that is refused on its own, or of all together."""
    for name, value in options.items():
        error = _refusal(name, value)
        if error is not None:
            return InvalidArgument(fields[name], "is not a value of this option")
    return InvalidArgument("parameters", f"{', '.join(fields.values())} do not go together")


def _extras(message: kserve_pb2.ModelInferRequest, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    asked = {name.removeprefix("return_") for name, value in inputs.items() if name.startswith("return_") and value}
    for number, output in enumerate(message.outputs):
        if output.name != TEXT_OUTPUT and output.name not in EXTRA_OUTPUTS:
            known = f"{TEXT_OUTPUT} or {', '.join(EXTRA_OUTPUTS)}"
            raise InvalidArgument(f"outputs[{number}].name", f"must be {known}")
        if output.parameters:
            raise InvalidArgument(f"outputs[{number}].parameters", "neither shared memory nor classes are supported")
        asked.add(output.name)
    return tuple(name for name in EXTRA_OUTPUTS if name in asked)


def delta_response(asked: InferRequest, delta: text_pb2.TextDelta) -> kserve_pb2.ModelInferResponse:
    """Make the response of one piece of a stream; with several answers, the parameter `index` names its answer."""
    response = _response(asked, [delta.text])
    if asked.request.config.num_return_sequences > 1:
        response.parameters["index"].int64_param = delta.index
    response.parameters[FINAL].bool_param = False
    return response


def final_response(
    asked: InferRequest, texts: Sequence[str], finished: generation_pb2.Finished
) -> kserve_pb2.ModelInferResponse:
    """Make the last response: all texts, or empty ones after a stream, and the requested outputs."""
    response = _response(asked, texts)
    response.parameters[FINAL].bool_param = True
    for name in asked.extras:
        _add_output(response, name, EXTRA_OUTPUTS[name], list(_extra(name, finished)), is_raw=asked.is_raw)
    return response


def failed_response(asked: kserve_pb2.ModelInferRequest, message: str) -> kserve_pb2.ModelStreamInferResponse:
    """Make the response for a failed request of a stream."""
    response = kserve_pb2.ModelStreamInferResponse(error_message=message)
    response.infer_response.id, response.infer_response.model_name = asked.id, asked.model_name
    response.infer_response.parameters[FINAL].bool_param = True
    return response


def _response(asked: InferRequest, texts: Sequence[str]) -> kserve_pb2.ModelInferResponse:
    response = kserve_pb2.ModelInferResponse(model_name=asked.model, model_version=VERSION, id=asked.id)
    _add_output(response, TEXT_OUTPUT, "BYTES", [text.encode() for text in texts], is_raw=asked.is_raw)
    return response


def _add_output(
    response: kserve_pb2.ModelInferResponse, name: str, datatype: str, values: Sequence[Any], *, is_raw: bool
) -> None:
    output = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    if is_raw:
        form = _FORMATS.get(datatype)
        pieces = (struct.pack(f"<{form}", value) if form else _SIZE.pack(len(value)) + value for value in values)
        response.raw_output_contents.append(b"".join(pieces))
    elif datatype == "BYTES":
        output.contents.bytes_contents.extend(values)
    elif datatype == "FP32":
        output.contents.fp32_contents.extend(values)
    else:
        output.contents.uint_contents.extend(values)


def _extra(name: str, finished: generation_pb2.Finished) -> Iterator[Any]:
    """Values of an output of EXTRA_OUTPUTS, one for each answer; the prompt's length is one for all."""
    if name == "num_input_tokens":
        yield finished.usage.prompt_tokens
        return
    for result in finished.sequences:
        if name == "finish_reason":
            reason = common_pb2.FinishReason.Name(result.finish_reason)
            yield reason.removeprefix("FINISH_REASON_").lower().encode()
        else:
            yield result.token_count if name == "num_output_tokens" else result.cumulative_logprob


def model_metadata(name: str) -> kserve_pb2.ModelMetadataResponse:
    """Describe a model's tensors, which are the same for all."""
    response = kserve_pb2.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for tensor, datatype in {TEXT_INPUT: "BYTES", **OPTIONAL_INPUTS}.items():
        response.inputs.add(name=tensor, datatype=datatype, shape=[1])
    for tensor, datatype in {TEXT_OUTPUT: "BYTES", **EXTRA_OUTPUTS}.items():
        response.outputs.add(name=tensor, datatype=datatype, shape=[-1])
    return response


def model_config(name: str) -> kserve_pb2.ModelConfigResponse:
    """Describe them in Triton's form."""
    config = kserve_pb2.ModelConfig(name=name, platform=PLATFORM, backend=PLATFORM)
    config.model_transaction_policy.decoupled = True
    for tensor, datatype in {TEXT_INPUT: "BYTES", **OPTIONAL_INPUTS}.items():
        config.input.add(name=tensor, data_type=_TYPES[datatype], dims=[1], optional=tensor != TEXT_INPUT)
    for tensor, datatype in {TEXT_OUTPUT: "BYTES", **EXTRA_OUTPUTS}.items():
        config.output.add(name=tensor, data_type=_TYPES[datatype], dims=[-1])
    return kserve_pb2.ModelConfigResponse(config=config)


_TYPES = {
    "BYTES": kserve_pb2.TYPE_STRING,
    "BOOL": kserve_pb2.TYPE_BOOL,
    "UINT32": kserve_pb2.TYPE_UINT32,
    "FP32": kserve_pb2.TYPE_FP32,
}
