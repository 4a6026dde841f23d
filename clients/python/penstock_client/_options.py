"""Keyword options of a call, and the request messages made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf import struct_pb2
from penstock.v1 import common_pb2, config_pb2, text_pb2, tokenizer_pb2


class GenerationOptions(TypedDict, total=False):
    """Options of one request; names and meanings are transformers' GenerationConfig where it has them.

    An option that is left out is the server's: the model's generation_config.json, then Penstock's defaults. Options
    of GenerationConfig that are not listed here go in `config`, a penstock.v1 GenerationConfig.
    """

    max_new_tokens: int
    min_new_tokens: int
    max_length: int
    max_time: float
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    num_return_sequences: int
    config: config_pb2.GenerationConfig
    # StopConfig.
    stop_strings: Sequence[str]
    stop_token_ids: Sequence[int | Sequence[int]]
    ignore_eos: bool
    include_stop_string_in_output: bool
    # OutputConfig.
    return_token_ids: bool
    top_logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    echo: bool
    stream_interval: int
    # The request.
    model: str
    request_id: str
    session_id: str
    priority: int
    cache_salt: str


_STOP = {"ignore_eos", "include_stop_string_in_output"}
_OUTPUT = set(config_pb2.OutputConfig.DESCRIPTOR.fields_by_name)
_REQUEST = {"model", "request_id", "session_id", "priority", "cache_salt"}
_CONFIG = set(GenerationOptions.__annotations__) - _OUTPUT - _REQUEST - _STOP - {"config", "stop_strings"}

Messages = str | Iterable[Mapping[str, Any] | tokenizer_pb2.Message]
TextRequest = text_pb2.GenerateTextRequest | text_pb2.ChatRequest


def _apply(request: TextRequest, options: Mapping[str, Any]) -> None:
    """Copy keyword options into the request. Raises TypeError for an unknown one."""
    if "config" in options:
        request.config.CopyFrom(options["config"])
    for name, value in options.items():
        if value is None or name == "config":
            continue
        if name == "stop_strings":
            request.stop.stop_strings.extend([value] if isinstance(value, str) else value)
        elif name == "stop_token_ids":
            for entry in value:
                request.stop.stop_token_ids.append(
                    common_pb2.TokenIds(ids=[entry] if isinstance(entry, int) else list(entry))
                )
        elif name == "logit_bias":
            request.config.logit_bias.update(value)
        elif name in _STOP:
            setattr(request.stop, name, value)
        elif name in _OUTPUT:
            setattr(request.output, name, value)
        elif name in _REQUEST:
            setattr(request, name, value)
        elif name in _CONFIG:
            setattr(request.config, name, value)
        else:
            raise TypeError(f"unknown option {name!r}; other GenerationConfig fields go in config=")


def generate_request(prompt: str | Sequence[int], options: Mapping[str, Any]) -> text_pb2.GenerateTextRequest:
    """A GenerateTextRequest for text or token ids."""
    request = text_pb2.GenerateTextRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    _apply(request, options)
    return request


def chat_request(
    messages: Messages,
    tools: Iterable[Mapping[str, Any]],
    documents: Iterable[Mapping[str, str]],
    chat_template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> text_pb2.ChatRequest:
    """A ChatRequest; a plain string is one user message. Tools may be OpenAI-shaped or bare functions."""
    request = text_pb2.ChatRequest()
    for message in [{"role": "user", "content": messages}] if isinstance(messages, str) else messages:
        request.messages.append(message if isinstance(message, tokenizer_pb2.Message) else _message(message))
    for tool in tools:
        function = tool.get("function", tool)
        parameters = struct_pb2.Struct()
        parameters.update(function.get("parameters", {}))
        request.tools.add(name=function["name"], description=function.get("description", ""), parameters=parameters)
    for document in documents:
        request.documents.add(title=document.get("title", ""), text=document.get("text", ""))
    if chat_template_kwargs:
        request.chat_template_kwargs.update(dict(chat_template_kwargs))
    _apply(request, options)
    return request


def _message(message: Mapping[str, Any]) -> tokenizer_pb2.Message:
    """A Message from an OpenAI-like mapping. Raises ValueError for an unknown key."""
    made = tokenizer_pb2.Message()
    for key, value in message.items():
        if key == "tool_calls":
            for call in value or ():
                function = call.get("function", call)
                made.tool_calls.add(
                    id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", "{}")
                )
        elif key in tokenizer_pb2.Message.DESCRIPTOR.fields_by_name:
            setattr(made, key, value or "")
        else:
            raise ValueError(f"unknown key {key!r} in a message")
    return made
