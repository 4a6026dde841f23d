"""Conversion of public requests to internal ones, and of internal output to public messages. Pure, no I/O."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from google.protobuf import json_format

from penstock.common.errors import InvalidArgument, ResourceExhausted
from penstock.common.pace import Demand
from penstock.common.unknown_fields import refuse_unknown_fields
from penstock.generation.options.table import CONFIG
from penstock.router.backends.prefix_index import BlockNames, content_hashes
from penstock.router.config import RouterConfig
from penstock.router.requests import prompt_length
from penstock.router.requests.delta_buffer import PendingDelta
from penstock.router.tokenizer.pipeline import Prompt
from penstock.v1 import config_pb2, generation_pb2, model_pb2, text_pb2, tokenizer_pb2

PublicRequest = text_pb2.GenerateTextRequest | text_pb2.ChatRequest
PublicResponse = text_pb2.GenerateTextResponse | text_pb2.ChatResponse
MAX_SEED = 2**63 - 1
# More than any context has.
MAX_OUTPUT_TOKENS = 1 << 31
# Clients receive at most 4 MiB by default.
MAX_RESPONSE_BYTES = 4 << 20
# Rough bytes of text for each token, for forecasts of a prompt that is not encoded yet.
BYTES_PER_TOKEN = 4
_OPTIONS: tuple[Literal["config", "stop", "output", "constraint"], ...] = ("config", "stop", "output", "constraint")
# Fields with another name here than in the generation service.
_FIELDS: Mapping[str, str] = {"seed": "config.seed", "prompt_token_ids": "prompt", "token_ids": "prompt"}
# Options that ask for a mode with all tokens at the end. Forced words are lists, and come with beams.
_AT_THE_END = {
    name: spec
    for name, spec in CONFIG.items()
    if spec.chooses is not None
    and not spec.chooses.streams
    and config_pb2.GenerationConfig.DESCRIPTOR.fields_by_name[name].has_presence
}


def check(request: PublicRequest, config: RouterConfig) -> None:
    """Refuse a request that is wrong with any tokenizer and model. Raises InvalidArgument naming the field."""
    _check_length("request_id", request.request_id, config.max_request_id_chars)
    _check_length("session_id", request.session_id, config.max_session_id_chars)
    _check_length("cache_salt", request.cache_salt, config.max_session_id_chars)
    _check_options_size(request, config.max_options_bytes)
    for name in _OPTIONS:
        if request.HasField(name):
            refuse_unknown_fields(getattr(request, name), name)
    if request.config.HasField("seed") and request.config.seed > MAX_SEED:
        raise InvalidArgument("config.seed", "must be in [0, 2^63 - 1]")
    if request.config.num_return_sequences > config.max_sequences:
        raise InvalidArgument("config.num_return_sequences", f"must be at most {config.max_sequences}")
    if isinstance(request, text_pb2.ChatRequest):
        if not request.messages:
            raise InvalidArgument("messages", "must not be empty")
        if request.output.echo:
            raise InvalidArgument("output.echo", "is available in Generate only")
        _check_tool_choice(request)
    elif request.WhichOneof("prompt") is None and not request.HasField("inputs_embeds"):
        raise InvalidArgument("prompt", "text or token_ids must be set, or inputs_embeds")
    elif request.suffix and request.HasField("inputs_embeds"):
        raise InvalidArgument("suffix", "follows a prompt of text or ids: it cannot be combined with inputs_embeds")


def _check_tool_choice(request: text_pb2.ChatRequest) -> None:
    refuse_unknown_fields(request.tool_choice, "tool_choice")
    if not forces_calls(request):
        return
    if not request.tools:
        raise InvalidArgument("tool_choice", "needs tools")
    if request.continue_final_message:
        raise InvalidArgument("tool_choice", "forces calls, and the answer has begun already (continue_final_message)")
    name = request.tool_choice.function
    if name and all(tool.name != name for tool in request.tools):
        raise InvalidArgument("tool_choice.function", "must be the name of one of the tools")


def forces_calls(request: text_pb2.ChatRequest) -> bool:
    """True when the answer must be calls."""
    return bool(request.tool_choice.required or request.tool_choice.function)


def begin_prompt(prompt: Prompt, request: PublicRequest, info: model_pb2.GetModelInfoResponse | None) -> None:
    """Begin an empty prompt of Generate with the beginning-of-sequence id: the request's, or else the model's.

    generate() does the same without an input. Without either id the prompt stays empty, and `check_prompt` refuses it.
    """
    if prompt.token_ids or isinstance(request, text_pb2.ChatRequest) or request.HasField("inputs_embeds"):
        return
    if request.config.HasField("bos_token_id"):
        prompt.token_ids.append(request.config.bos_token_id)
    elif info is not None and info.HasField("bos_token_id"):
        prompt.token_ids.append(info.bos_token_id)


def check_prompt(prompt: Prompt, request: PublicRequest, info: model_pb2.GetModelInfoResponse | None) -> None:
    """Refuse a prompt that is empty or leaves no room in the context. Raises InvalidArgument."""
    field, length = prompt_field(request), num_prompt_tokens(prompt, request)
    has_embeds = isinstance(request, text_pb2.GenerateTextRequest) and request.HasField("inputs_embeds")
    if not length and not has_embeds:
        text = "must have at least one token"
        if field == "prompt":
            text += ": the model has no id to begin with, and config.bos_token_id is unset"
        raise InvalidArgument(field, text, reason="EMPTY_PROMPT")
    limit = info.limits.max_context_tokens if info is not None else 0
    if limit and length >= limit:
        raise InvalidArgument(
            "inputs_embeds" if has_embeds else field,
            f"has {length} tokens; at most {limit - 1} and one to generate fit the context",
            reason="PROMPT_TOO_LONG",
        )


def num_prompt_tokens(prompt: Prompt, request: PublicRequest) -> int:
    """Return the number of tokens that the model reads: ids, and embeddings in place of them or before them."""
    num_ids = len(prompt.token_ids)
    return num_ids if isinstance(request, text_pb2.ChatRequest) else prompt_length.num_prompt_tokens(request, num_ids)


def prefix_hashes(prompt: Prompt, request: PublicRequest, block_size: int, salt: str, max_blocks: int) -> list[int]:
    """Return at most `max_blocks` hashes of the blocks at the head of a prompt of ids, or of embeddings alone."""
    if isinstance(request, text_pb2.ChatRequest) or not request.HasField("inputs_embeds"):
        return BlockNames(prompt.token_ids, block_size, salt, max_blocks)
    data, rows = request.inputs_embeds.data, max(1, prompt_length.num_embeds(request))
    return content_hashes(data, block_size * max(1, len(data) // rows), f"embeds:{salt}", max_blocks)


def _check_length(field: str, value: str, limit: int) -> None:
    if len(value) > limit:
        raise InvalidArgument(field, f"must have at most {limit} characters")


def _check_options_size(request: PublicRequest, limit: int) -> None:
    """Refuse options that take too many bytes. Raises InvalidArgument.

    They are copied and forwarded: millions of tiny entries would hold up every stream of this process.
    """
    if request.ByteSize() <= limit:
        return
    sizes = {name: getattr(request, name).ByteSize() for name in _OPTIONS}
    negative = request.config.WhichOneof("negative_prompt")
    if negative == "negative_prompt_ids":
        sizes["config"] -= request.config.negative_prompt_ids.ByteSize()
    elif negative is not None:
        sizes["config"] -= len(request.config.negative_prompt_text.encode())
    if sum(sizes.values()) > limit:
        field = max(sizes, key=lambda name: sizes[name])
        raise InvalidArgument(field, f"the options take more than the {limit} bytes of --max-options-bytes together")


def prompt_field(request: PublicRequest) -> str:
    """Name of the field that holds the prompt."""
    return "messages" if isinstance(request, text_pb2.ChatRequest) else "prompt"


def public_error(error: InvalidArgument, request: PublicRequest) -> InvalidArgument:
    """Return a backend's error with the client's name for the field."""
    field = _FIELDS.get(error.field or "", error.field or "request")
    if field == "prompt":
        field = prompt_field(request)
    elif field.startswith("constraint") and isinstance(request, text_pb2.ChatRequest) and forces_calls(request):
        return InvalidArgument("tools", f"cannot be forced: {error.description}", reason=error.reason)
    elif field == "calls" or field.startswith("calls.") or _is_about_a_tool(error, request):
        return InvalidArgument("tools", f"cannot be held to its schema: {error.description}", reason=error.reason)
    elif field == "config.negative_prompt_ids" and request.config.HasField("negative_prompt_text"):
        field = "config.negative_prompt_text"
    return error if field == error.field else InvalidArgument(field, error.description, reason=error.reason)


def _is_about_a_tool(error: InvalidArgument, request: PublicRequest) -> bool:
    """True for an error about the grammar of calls that may come in place of a constrained answer."""
    is_of_both = (error.field or "").startswith("constraint") and error.description.startswith("tool ")
    return is_of_both and isinstance(request, text_pb2.ChatRequest) and parses_tools(request)


def to_template(
    request: PublicRequest, prompt: Prompt, *, model: str, adapter: str, salt: str, key: str, fingerprint: str
) -> generation_pb2.GenerateRequest:
    """Make the request for any backend, without the fields of an attempt. `seed` is always set."""
    asked = request.HasField("constraint")
    template = generation_pb2.GenerateRequest(
        prompt_token_ids=prompt.token_ids,
        stop=request.stop if request.HasField("stop") else None,
        # That of forced calls first: an answer that is calls has no text of its own.
        constraint=prompt.constraint if prompt.constraint is not None or not asked else request.constraint,
        seed=request.config.seed if request.config.HasField("seed") else secrets.randbits(63),
        cache_salt=salt,
        fair_share_key=key,
        adapter=adapter,
        priority=request.priority,
        tokenizer_fingerprint=fingerprint,
        model=model,
        begins_text=isinstance(request, text_pb2.ChatRequest),
        thought=prompt.thought,
        thought_end=prompt.thought_end,
        calls=prompt.calls,
    )
    # Only these may end by LENGTH before their limit (backends/expectations.py).
    template.may_be_closed = template.HasField("constraint")
    template.config.CopyFrom(request.config)
    if isinstance(request, text_pb2.GenerateTextRequest):
        template.inputs_embeds_before_ids = request.inputs_embeds_before_ids
        if request.HasField("inputs_embeds"):
            template.inputs_embeds.CopyFrom(request.inputs_embeds)
    if request.HasField("output"):
        template.output.CopyFrom(request.output)
        # The router adds the text; generation has only ids.
        template.output.ClearField("echo")
    return template


def to_demand(request: PublicRequest, key: str, info: model_pb2.GetModelInfoResponse | None) -> Demand:
    """Estimate the size of a request before its prompt is encoded. `key`: its `fair_share_key`."""
    config, prompt_tokens = request.config, request.ByteSize() // BYTES_PER_TOKEN
    if isinstance(request, text_pb2.GenerateTextRequest):
        if request.HasField("inputs_embeds"):
            num_ids = len(request.token_ids.ids) or len(request.text) // BYTES_PER_TOKEN
            prompt_tokens = prompt_length.num_prompt_tokens(request, num_ids)
        elif request.HasField("token_ids"):
            prompt_tokens = len(request.token_ids.ids)
    # Unset: the rest of the context, but answers take only a part of it.
    longest = max(info.limits.max_context_tokens - prompt_tokens, 1) if info is not None else MAX_OUTPUT_TOKENS
    sequences = max(1, config.num_return_sequences, config.num_beams)
    if info is not None and info.limits.max_running_sequences:
        # The backend refuses a larger number. Until it does, that number must not count against others.
        sequences = min(sequences, info.limits.max_running_sequences)
    return Demand(
        tenant=key,
        prompt_tokens=prompt_tokens,
        max_output_tokens=min(config.max_new_tokens, longest) if config.HasField("max_new_tokens") else longest,
        sequences=sequences,
    )


def most_tokens(prompt: Prompt, request: PublicRequest, info: model_pb2.GetModelInfoResponse | None) -> tuple[int, int]:
    """Return the tokens of a prompt, and the most that all answers together may have, as backends take them
    (`generation/options/lengths.py`): the request's own limit, else the model's, else the rest of the context."""
    prompt_tokens, room = num_prompt_tokens(prompt, request), MAX_OUTPUT_TOKENS
    if info is not None and info.limits.max_context_tokens:
        room = max(info.limits.max_context_tokens - prompt_tokens, 1)
    asked = _limit_of(request.config, prompt_tokens)
    if asked is None and info is not None:
        asked = _limit_of(info.default_config, prompt_tokens)
    most = room if asked is None else min(asked, room)
    return prompt_tokens, most * num_sequences(request, info)


def _limit_of(config: config_pb2.GenerationConfig, prompt_tokens: int) -> int | None:
    """Return the limit on new tokens that a configuration sets; None: none that holds for this prompt."""
    if config.HasField("max_new_tokens"):
        return config.max_new_tokens
    if config.HasField("max_length") and config.max_length > prompt_tokens:
        return config.max_length - prompt_tokens
    return None


def num_sequences(request: PublicRequest, info: model_pb2.GetModelInfoResponse | None) -> int:
    """Number of sequences that will be returned."""
    if request.config.HasField("num_return_sequences"):
        return max(1, request.config.num_return_sequences)
    return max(1, info.default_config.num_return_sequences) if info is not None else 1


def warnings_of(request: PublicRequest, prompt: Prompt, *, hides_tools: bool = False) -> tuple[str, ...]:
    """The router's own warnings, such as options without effect; the backend adds its own.

    `hides_tools`: the model's chat template does not show tools.
    """
    found = ["metadata has no effect yet"] if request.HasField("metadata") else []
    if isinstance(request, text_pb2.ChatRequest) and forces_calls(request) and request.HasField("constraint"):
        found.append("constraint has no effect: the answer is calls, which tool_choice forces")
    if hides_tools and isinstance(request, text_pb2.ChatRequest) and parses_tools(request):
        found.append(
            "the model's chat template does not show tools, so the prompt has none"
            + (", and forced calls are guesses" if forces_calls(request) else "")
        )
    is_told = prompt.spelled and not (
        isinstance(request, text_pb2.GenerateTextRequest) and request.HasField("parse_special_tokens")
    )
    if is_told:
        found.append(
            f"the prompt spells control tokens ({' '.join(prompt.spelled)}), which stay text: parse_special_tokens "
            "true makes them tokens"
        )
    return tuple(found)


def comes_in_bursts(request: PublicRequest, info: model_pb2.GetModelInfoResponse | None) -> bool:
    """True when many tokens of a sequence may come at once, in several messages: then no reader can keep up."""
    if request.output.stream_interval > 1:
        return True
    config: Any = request.config
    default = config if info is None else info.default_config
    return any(
        spec.asks(getattr(config if config.HasField(name) else default, name)) for name, spec in _AT_THE_END.items()
    )


def wants_tensors(output: config_pb2.OutputConfig) -> bool:
    """True when any tensor is asked for."""
    return output.output_scores or output.output_logits or output.output_hidden_states or output.output_attentions


def parses_tools(request: text_pb2.ChatRequest) -> bool:
    """True when tool calls are parsed out of the text: tools are offered, and may be called."""
    return bool(request.tools) and not request.tool_choice.none


def schemas_of(request: text_pb2.ChatRequest) -> dict[str, dict[str, Any]]:
    """Return the JSON Schemas of the tools' parameters by name. Raises InvalidArgument for a value that is not JSON."""
    found = {}
    for place, tool in enumerate(request.tools):
        try:
            found[tool.name] = _plain(json_format.MessageToDict(tool.parameters))
        except (ValueError, json_format.Error):
            raise InvalidArgument(f"tools[{place}].parameters", "must have finite numbers") from None
    return found


def forced_schemas(request: text_pb2.ChatRequest) -> dict[str, dict[str, Any]]:
    """Return the schemas of the tools that may be called."""
    name = request.tool_choice.function
    return {tool: schema for tool, schema in schemas_of(request).items() if name in ("", tool)}


def may_call_in_place(request: text_pb2.ChatRequest) -> bool:
    """True where the model may call tools in place of an answer that obeys the request's constraint: not where the
    answer has begun."""
    return request.HasField("constraint") and parses_tools(request) and not request.continue_final_message


def strict_tools(request: text_pb2.ChatRequest) -> frozenset[str]:
    """Return the names of the tools with calls that obey their schemas, forced or not."""
    return frozenset(tool.name for tool in request.tools if tool.strict)


def allows_one_call(request: text_pb2.ChatRequest) -> bool:
    """True when an answer has at most one call."""
    return request.HasField("parallel_tool_calls") and not request.parallel_tool_calls


def _plain(value: Any) -> Any:
    """Return a value of a Struct with whole numbers as int, and with sorted fields: a Struct keeps no order."""
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def skips_special_tokens(request: PublicRequest) -> bool:
    """True when special tokens are left out of the text, the default."""
    return request.output.skip_special_tokens if request.output.HasField("skip_special_tokens") else True


def to_decode_options(
    request: PublicRequest, prompt: Prompt, context_of: Callable[[Sequence[int], bool], Sequence[int]]
) -> tokenizer_pb2.DecodeStreamOpen:
    """Make the decode options. A completion continues its prompt's text; a chat answer starts afresh.

    `context_of` returns the end of a prompt that the text depends on, with special tokens skipped or not.
    """
    options = tokenizer_pb2.DecodeStreamOpen(
        stop_strings=request.stop.stop_strings,
        include_stop_string_in_output=request.stop.include_stop_string_in_output,
    )
    if request.output.HasField("skip_special_tokens"):
        options.skip_special_tokens = request.output.skip_special_tokens
    if isinstance(request, text_pb2.ChatRequest):
        options.kept_special_tokens.extend(prompt.chat.kept_for(with_tools=parses_tools(request)))
        if prompt.thought is not None and request.stop.stop_strings:
            options.thought.CopyFrom(prompt.thought)
            options.thought.ClearField("grammar")
    if isinstance(request, text_pb2.GenerateTextRequest):
        context = context_of(prompt.token_ids, skips_special_tokens(request))
        options.prefix_token_ids.extend(context)
        options.prefix_is_cut = len(context) < len(prompt.token_ids)
        # The echo of ids leaves out a character that they do not complete; the answer shows what it becomes.
        options.return_open_end = request.output.echo and prompt.text is None
    return options


def cache_salt(tenant: str, client_salt: str) -> str:
    """Salt within which prefix blocks are shared: the tenant's, narrowed by the client's own."""
    return hashlib.sha256(f"{len(tenant)}:{tenant}{client_salt}".encode()).hexdigest()


def session_key(tenant: str, session_id: str, adapter: str) -> str:
    """Key under which the policy remembers a session's backend; another adapter may have another backend. Empty without
    a session."""
    if not session_id:
        return ""
    return f"{tenant}:{session_id}" if not adapter else f"{tenant}:{adapter}:{session_id}"


def text_delta(seq: int, delta: PendingDelta) -> text_pb2.GenerateTextResponse:
    """Make one delta of Generate. Fields are set one by one: keyword arguments take twice as long on every token."""
    response = text_pb2.GenerateTextResponse()
    message = response.delta
    message.seq, message.index, message.text = seq, delta.index, delta.text
    if delta.token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(delta.logprobs)
    if delta.tensors:
        message.tensors.extend(delta.tensors)
    return response


def chat_delta(seq: int, delta: PendingDelta) -> text_pb2.ChatResponse:
    """Make one delta of Chat."""
    response = text_pb2.ChatResponse()
    message = response.delta
    message.seq, message.index, message.text = seq, delta.index, delta.text
    if delta.reasoning:
        message.reasoning = delta.reasoning
    if delta.token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(delta.logprobs)
    if delta.tensors:
        message.tensors.extend(delta.tensors)
    for call in delta.tool_calls:
        message.tool_calls.add(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
    return response


EventT = TypeVar("EventT", generation_pb2.Started, generation_pb2.Finished)


def check_size(event: EventT) -> EventT:
    """Refuse an event that is larger than clients can receive. Raises ResourceExhausted."""
    size = event.ByteSize()
    if size > MAX_RESPONSE_BYTES - 1024:
        raise ResourceExhausted(
            "the prompt's log-probabilities do not fit one message: ask for fewer alternatives or a shorter prompt",
            reason="RESPONSE_TOO_LARGE",
            metadata={"field": "output.prompt_logprobs", "bytes": str(size)},
        )
    return event
