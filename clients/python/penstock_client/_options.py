"""Keyword options of a call, and the request messages made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypedDict, Unpack

from google.protobuf import struct_pb2
from penstock.v1 import config_pb2, text_pb2, tokenizer_pb2

from penstock_client._config_values import CONSTRAINTS, Ids, Words, naming, set_config, set_constraint, token_ids


class GenerationOptions(TypedDict, total=False):
    """Options of one request. Names, meanings and types are transformers' GenerationConfig's where it has them.

    An option that is left out, or None, is the server's: the model's generation_config.json, then Penstock's defaults.
    docs/guide/generation-config.md tells of each what it does. An unknown one raises TypeError.
    """

    # Length.
    max_new_tokens: int
    min_new_tokens: int
    max_length: int
    min_length: int
    max_time: float
    # Strategy.
    do_sample: bool
    num_beams: int
    num_beam_groups: int
    diversity_penalty: float
    length_penalty: float
    early_stopping: bool | Literal["never"]
    penalty_alpha: float
    num_return_sequences: int
    prompt_lookup_num_tokens: int
    max_matching_ngram_size: int
    # A name that the server knows.
    assistant_model: str
    num_assistant_tokens: int
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"]
    assistant_confidence_threshold: float
    dola_layers: Literal["low", "high"] | Sequence[int]
    guidance_scale: float
    # Text or ids.
    negative_prompt: str | Sequence[int]
    negative_prompt_ids: Sequence[int]
    # Scores.
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_h: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    encoder_repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    encoder_no_repeat_ngram_size: int
    bad_words_ids: Sequence[Ids]
    # Each a phrase, or alternatives.
    force_words_ids: Sequence[Words]
    # As force_words_ids, or transformers' own constraints.
    constraints: Sequence[Any]
    renormalize_logits: bool
    remove_invalid_values: bool
    forced_bos_token_id: int
    forced_eos_token_id: int | Sequence[int]
    # (start_index, decay_factor)
    exponential_decay_length_penalty: tuple[int, float]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Ids, float]]
    # {"greenlist_ratio": …}, or transformers' WatermarkingConfig.
    watermarking_config: Any
    token_healing: bool
    logit_bias: Mapping[int, float] | Mapping[str, float]
    allowed_token_ids: Sequence[int]
    # The output is one of these sequences, or the beginning of one.
    allowed_token_trie: Sequence[Ids]
    seed: int
    # Fields of it that are not given as keywords.
    config: config_pb2.GenerationConfig
    # Structured output: one of these. A schema is a JSON text or what json.dumps makes one of.
    json_schema: str | bool | Mapping[str, Any]
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    # StopConfig.
    stop_strings: str | Sequence[str]
    # Single ids, or runs of ids.
    stop_token_ids: int | Sequence[int | Sequence[int]]
    ignore_eos: bool
    include_stop_string_in_output: bool
    # OutputConfig.
    return_token_ids: bool
    top_logprobs: int
    prompt_logprobs: int
    output_scores: bool
    output_logits: bool
    output_hidden_states: bool
    output_attentions: bool
    scores_top_k: int
    tensor_steps: Sequence[int]
    skip_special_tokens: bool
    echo: bool
    stream_interval: int
    # The request.
    model: str
    adapter: str
    request_id: str
    session_id: str
    priority: int
    cache_salt: str
    # Of generate(): whether the tokenizer's own special tokens are added to a text; true when left out.
    add_special_tokens: bool
    # Of chat(): whether the prompt ends where an answer begins (true when left out), or goes on with the last message.
    add_generation_prompt: bool
    continue_final_message: bool


_STOP = set(config_pb2.StopConfig.DESCRIPTOR.fields_by_name)
_OUTPUT = set(config_pb2.OutputConfig.DESCRIPTOR.fields_by_name)
_REQUEST = {"model", "adapter", "request_id", "session_id", "priority", "cache_salt"}
# Options of one method only.
_GENERATE, _CHAT = {"add_special_tokens"}, {"add_generation_prompt", "continue_final_message"}
_CONFIG = {*config_pb2.GenerationConfig.DESCRIPTOR.fields_by_name, "negative_prompt"}

Messages = str | Iterable[Mapping[str, Any] | tokenizer_pb2.Message]
TextRequest = text_pb2.GenerateTextRequest | text_pb2.ChatRequest


def _apply(request: TextRequest, options: Mapping[str, Any]) -> None:
    """Copy keyword options into the request. Raises TypeError for an unknown one, and for a value of a wrong type."""
    if options.get("config") is not None:
        request.config.CopyFrom(options["config"])
    if any(options.get(name) is not None for name in CONSTRAINTS):
        set_constraint(request.constraint, options)
    for name, value in options.items():
        if value is None or name == "config" or name in CONSTRAINTS:
            continue
        with naming(name):
            _set(request, name, value)


def _set(request: TextRequest, name: str, value: Any) -> None:
    if name in _CONFIG:
        set_config(request.config, name, value)
    elif name in _STOP:
        _set_stop(request.stop, name, value)
    elif name in _OUTPUT:
        _set_output(request.output, name, value)
    elif name in _REQUEST or (name in _GENERATE | _CHAT and name in request.DESCRIPTOR.fields_by_name):
        setattr(request, name, value)
    elif name in _GENERATE | _CHAT:
        raise TypeError(f"is for {'generate' if name in _GENERATE else 'chat'} only")
    else:
        raise TypeError("unknown, see GenerationOptions")


def _set_stop(stop: config_pb2.StopConfig, name: str, value: Any) -> None:
    if name == "stop_strings":
        stop.stop_strings.extend([value] if isinstance(value, str) else value)
    elif name == "stop_token_ids":
        entries: Iterable[Any] = [value] if isinstance(value, Integral) else value
        for entry in entries:
            stop.stop_token_ids.append(token_ids([entry] if isinstance(entry, Integral) else entry))  # type: ignore[list-item]
    else:
        setattr(stop, name, value)


def _set_output(output: config_pb2.OutputConfig, name: str, value: Any) -> None:
    if name == "tensor_steps":
        output.tensor_steps.extend(value)
    else:
        setattr(output, name, value)


def check_options(**options: Unpack[GenerationOptions]) -> None:
    """Raises TypeError or ValueError, as a call would, for options that cannot be sent."""
    request = text_pb2.ChatRequest() if _CHAT & options.keys() else text_pb2.GenerateTextRequest()
    _apply(request, options)


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
