"""Keyword options of a call, and the request messages made from them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from penstock.common.errors import InvalidArgument
from penstock.common.hf_fields import REFUSED, WITHOUT_EFFECT, no_effect
from penstock.v1 import config_pb2, text_pb2, tokenizer_pb2

from penstock_client._config_values import CONSTRAINTS, has_runs, set_constraint, set_ends, set_option
from penstock_client._option_table import CONFIG, OUTPUT, STOP, OptionKeywords
from penstock_client._structs import Structs
from penstock_client._tensors import set_rows
from penstock_client._wrong_values import (
    MISFITS,
    WrongType,
    expected,
    found,
    naming,
    naming_prompt,
    raise_naming,
    unknown,
)


class GenerationOptions(OptionKeywords, total=False):
    """Options of one request. Names, meanings and types are those of transformers' GenerationConfig, if it has them.

    The server decides an option that is left out or None: the model's generation_config.json, then Penstock's defaults.
    docs/reference/options.md describes every option. An unknown one raises TypeError.
    """

    # Fields of GenerationConfig that are not given as keywords.
    config: config_pb2.GenerationConfig
    # Structured output: one of these. A schema is a JSON text, or a value for json.dumps.
    json_schema: str | bool | Mapping[str, Any]
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    # The request.
    model: str
    adapter: str
    request_id: str
    session_id: str
    priority: int
    cache_salt: str
    # Of a text or ids alone. True, or left out: the tokenizer's own special tokens are added to a text.
    add_special_tokens: bool
    # Of a text alone. True: what spells a control token becomes that token. Left out: as the server is set up, which
    # keeps it text and warns.
    parse_special_tokens: bool
    # Of a text alone. The answer is to stand between the prompt and this text; for models with tokens for that.
    suffix: str
    # Not with a conversation. Embeddings in place of the prompt's ids, (tokens, hidden size): a torch tensor, a numpy
    # array, or rows of numbers. The prompt is then left out, or the ids that penalties and the like take for it.
    inputs_embeds: Any
    # With inputs_embeds. True: they precede the prompt, which the model also reads.
    inputs_embeds_before_ids: bool
    # Of a conversation alone. True, or left out: the prompt ends where an answer begins. False: the last message goes
    # on.
    add_generation_prompt: bool
    continue_final_message: bool


class PromptOptions(GenerationOptions, total=False):
    """Options of `generate` and `stream`: those of every request, and what goes with a conversation."""

    # OpenAI-shaped, or bare functions.
    tools: Iterable[Mapping[str, Any]]
    documents: Iterable[Mapping[str, str]]
    chat_template_kwargs: Mapping[str, Any] | None
    # "auto", "none", "required" (a call is forced), a tool's name, or OpenAI's object with one.
    tool_choice: str | Mapping[str, Any] | None
    # False: at most one call is returned.
    parallel_tool_calls: bool | None


_WITH_CONVERSATION = PromptOptions.__optional_keys__ - GenerationOptions.__optional_keys__
_REQUEST = {"model", "adapter", "request_id", "session_id", "priority", "cache_salt"}
# Options of one kind of prompt only.
_COMPLETION = {"add_special_tokens", "parse_special_tokens", "suffix", "inputs_embeds", "inputs_embeds_before_ids"}
_CHAT = {"add_generation_prompt", "continue_final_message"}
_OF_ONE_KIND = _COMPLETION | _CHAT
_CONSTRAINTS = frozenset(CONSTRAINTS)

# Approximate number of frames between a warning and the user's call.
_CALLER = 4
_LEAST_SEED = -(1 << 63)
# Types of OpenAI's content parts: text, and the others, which errors name.
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_PARTS = ("image", "image_url", "input_image", "audio", "input_audio", "video", "video_url", "file", "input_file")

Message = Mapping[str, Any] | tokenizer_pb2.Message
Messages = str | Iterable[Message]
# A text, token ids, or a conversation.
Prompt = str | Sequence[int] | Sequence[Message]
TextRequest = text_pb2.GenerateTextRequest | text_pb2.ChatRequest


def _apply(request: TextRequest, options: Mapping[str, Any]) -> None:
    """Copy keyword options into the request. Raises TypeError for an unknown one, and for a value of a wrong type."""
    if options.get("config") is not None:
        with naming("config", expected(request, "config"), options["config"]):
            request.config.CopyFrom(options["config"])
    if not _CONSTRAINTS.isdisjoint(options):
        set_constraint(request.constraint, options)
    for name, value in options.items():
        if value is None or name == "config" or name in CONSTRAINTS:
            continue
        if name in WITHOUT_EFFECT:
            warnings.warn(no_effect(name), stacklevel=_CALLER)
            continue
        try:
            _set(request, name, value)
        except MISFITS as error:
            # Without a block of `naming`: every request has some options.
            raise_naming(error, name, partial(_expected, request, name), value)


def _expected(request: TextRequest, name: str) -> str:
    """Return a description of the values that an option takes."""
    for message, table in ((request.config, CONFIG), (request.stop, STOP), (request.output, OUTPUT)):
        if name in table:
            return expected(message, name, "stop_ids" if name == "eos_token_id" else table[name])
    return expected(request, name)


def _set(request: TextRequest, name: str, value: Any) -> None:
    if name == "seed" and isinstance(value, int) and _LEAST_SEED <= value < 0:
        # OpenAI's seeds are signed. They map onto half the range: -1 is the same seed as 2**63 - 1.
        value -= _LEAST_SEED
    if name == "eos_token_id" and has_runs(value):
        set_ends(request.config, request.stop, value)
    elif name in CONFIG:
        set_option(request.config, name, CONFIG[name], value)
    elif name in STOP:
        set_option(request.stop, name, STOP[name], value)
    elif name in OUTPUT:
        set_option(request.output, name, OUTPUT[name], value)
    elif name in _REQUEST or (name in _OF_ONE_KIND and name in request.DESCRIPTOR.fields_by_name):
        if name == "inputs_embeds":
            set_rows(getattr(request, name), value)
        else:
            setattr(request, name, value)
    elif name in _OF_ONE_KIND:
        raise WrongType(f"is for {'a text or ids' if name in _COMPLETION else 'a conversation'} only")
    elif name in REFUSED:
        raise WrongType(REFUSED[name])
    else:
        raise unknown(name, {*CONFIG, *STOP, *OUTPUT, *CONSTRAINTS, *_REQUEST, *_COMPLETION, *_CHAT})


def check_options(**options: Unpack[GenerationOptions]) -> None:
    """Raise TypeError or ValueError, as a call would, for options that cannot be sent."""
    request = text_pb2.ChatRequest() if _CHAT & options.keys() else text_pb2.GenerateTextRequest()
    _apply(request, options)


def text_request(prompt: Prompt, options: Mapping[str, Any]) -> TextRequest:
    """Return the request of a text, token ids or a conversation, with PromptOptions. Raises TypeError and ValueError
    naming an option, InvalidArgument."""
    asked = {name: value for name, value in options.items() if name not in _WITH_CONVERSATION}
    beside = {name: options[name] for name in _WITH_CONVERSATION if options.get(name) is not None}
    if is_conversation(prompt):
        tools, documents = beside.get("tools"), beside.get("documents")
        variables = beside.get("chat_template_kwargs")
        request = chat_request(prompt, tools or (), documents or (), variables, asked)  # type: ignore[arg-type]
        set_tool_choice(request, beside.get("tool_choice"), beside.get("parallel_tool_calls"))
        return request
    for name in sorted(beside):
        if beside[name] not in ((), [], {}):
            raise TypeError(f"option {name!r}: is for a conversation only")
    return generate_request(prompt, asked)  # type: ignore[arg-type]


def is_conversation(prompt: Any) -> bool:
    """True for a list of messages."""
    if isinstance(prompt, str) or not hasattr(prompt, "__len__") or not len(prompt):
        return False
    return isinstance(prompt, Sequence) and isinstance(prompt[0], Mapping | tokenizer_pb2.Message)


def generate_request(prompt: str | Sequence[int], options: Mapping[str, Any]) -> text_pb2.GenerateTextRequest:
    """Return a GenerateTextRequest for text or token ids; an empty text with `inputs_embeds` means no text."""
    request = text_pb2.GenerateTextRequest()
    if not hasattr(prompt, "__len__") or isinstance(prompt, bytes | bytearray | Mapping):
        raise TypeError(f"prompt: must be a text, a list of ids or a list of messages, found {found(prompt)}")
    if isinstance(prompt, str):
        if prompt or options.get("inputs_embeds") is None:
            with naming_prompt():
                request.text = prompt
    elif len(prompt) and isinstance(prompt[0], str | Sequence):
        raise TypeError("prompt: one text, the ids of one, or one conversation; generate_many takes several")
    else:
        request.token_ids.SetInParent()
        with naming_prompt():
            request.token_ids.ids.extend(prompt)
    _apply(request, options)
    return request


def check_many(prompts: Iterable[Prompt], options: Mapping[str, Any]) -> None:
    """Raise TypeError and ValueError for options that cannot be sent for several prompts, and for one prompt alone."""
    if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
        raise TypeError("prompts: several texts, runs of ids or conversations; generate takes one")
    if options.get("request_id"):
        raise ValueError("option 'request_id' is for one prompt")
    if options.get("inputs_embeds") is not None:
        raise ValueError("option 'inputs_embeds' is for one prompt")
    check_options(**{name: value for name, value in options.items() if name not in _WITH_CONVERSATION})


def chat_request(
    messages: Messages,
    tools: Iterable[Mapping[str, Any]],
    documents: Iterable[Mapping[str, str]],
    chat_template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> text_pb2.ChatRequest:
    """Return a ChatRequest; a plain string is one user message. Tools may be OpenAI-shaped or bare functions."""
    if not hasattr(messages, "__iter__"):
        raise TypeError(f"messages: must be a list of messages or a text, found {found(messages)}")
    request = text_pb2.ChatRequest()
    for number, message in enumerate(
        [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    ):
        made = message if isinstance(message, tokenizer_pb2.Message) else _message(message, f"messages[{number}]")
        request.messages.append(made)
    structs = Structs()
    for number, tool in enumerate(tools):
        _add_tool(request, tool, f"tools[{number}]", structs)
    for number, document in enumerate(documents):
        made_document, where = request.documents.add(), f"documents[{number}]"
        given = _object(document, where)
        for name in ("title", "text"):
            _set_text(made_document, name, given.get(name), where)
    if chat_template_kwargs:
        structs.set(request.chat_template_kwargs, chat_template_kwargs, "chat_template_kwargs")
    _apply(request, options)
    return request


def _add_tool(request: text_pb2.ChatRequest, tool: Any, where: str, structs: Structs) -> None:
    """Add a tool. Raises InvalidArgument naming `where` and its field."""
    given = _object(tool, where)
    function = _object(given.get("function", given), where)
    made = request.tools.add()
    if not function.get("name"):
        raise InvalidArgument(f"{where}.name", "must be a text")
    for name in ("name", "description"):
        _set_text(made, name, function.get(name), where)
    # Set even if empty: a template then sees a tool without parameters.
    made.parameters.SetInParent()
    structs.set(made.parameters, function.get("parameters", {}), f"{where}.parameters")
    strict = function.get("strict")
    if strict is not None:
        if not isinstance(strict, bool):
            raise InvalidArgument(f"{where}.strict", "must be true or false")
        made.strict = strict


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(where, "must be an object")
    return value


def _set_text(message: Any, name: str, value: Any, where: str) -> None:
    """Set a field that holds text; None leaves it empty. Raises InvalidArgument naming it."""
    try:
        setattr(message, name, value or "")
    # Not their own texts, which may repeat the value.
    except (TypeError, ValueError):
        raise InvalidArgument(f"{where}.{name}", "must be a text") from None


def set_tool_choice(
    request: text_pb2.ChatRequest, tool_choice: str | Mapping[str, Any] | None, parallel_tool_calls: bool | None
) -> None:
    """Set the choice: "auto", "none", "required", a tool's name, or OpenAI's object with one. Raises ValueError."""
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function", tool_choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise ValueError("tool_choice: an object needs the name of a function")
        request.tool_choice.function = name
    elif tool_choice in ("none", "required"):
        setattr(request.tool_choice, tool_choice, True)
    elif tool_choice not in (None, "auto"):
        request.tool_choice.function = tool_choice
    if parallel_tool_calls is not None:
        request.parallel_tool_calls = parallel_tool_calls


def render_request(
    messages: Messages,
    tools: Iterable[Mapping[str, Any]],
    documents: Iterable[Mapping[str, str]],
    chat_template_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> text_pb2.RenderChatRequest:
    """Return a RenderChatRequest: the fields shared with ChatRequest, made in the same way."""
    chat = chat_request(messages, tools, documents, chat_template_kwargs, options)
    return text_pb2.RenderChatRequest(**{field.name: value for field, value in chat.ListFields()})


def _message(message: Mapping[str, Any], where: str) -> tokenizer_pb2.Message:
    """Return a Message from an OpenAI-like mapping. Raises ValueError for an unknown key, InvalidArgument naming
    `where` for a content that is not text."""
    made = tokenizer_pb2.Message()
    for key, value in _object(message, where).items():
        if key == "tool_calls":
            for number, call in enumerate(value or ()):
                _add_tool_call(made, call, f"{where}.tool_calls[{number}]")
        elif key == "content" and value is not None:
            _set_text(made, key, _content(value, f"{where}.content"), where)
        elif key in tokenizer_pb2.Message.DESCRIPTOR.fields_by_name:
            _set_text(made, key, value, where)
        else:
            raise ValueError(f"unknown key {key!r} in a message")
    return made


def _add_tool_call(message: tokenizer_pb2.Message, call: Any, where: str) -> None:
    given = _object(call, where)
    function = _object(given.get("function", given), f"{where}.function")
    made = message.tool_calls.add()
    _set_text(made, "id", given.get("id"), where)
    _set_text(made, "name", function.get("name"), where)
    _set_text(made, "arguments", function.get("arguments", "{}"), where)


def _content(content: Any, where: str) -> str:
    """Return the text of a content: a string, or OpenAI's list of parts, joined. Raises InvalidArgument."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise InvalidArgument(where, "must be a text or a list of parts")
    return "".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidArgument(where, 'must be a text or a mapping such as {"type": "text", "text": "Hello"}')
    kind = part.get("type", "text")
    if kind not in _TEXT_PARTS:
        named = f"{kind} parts are not supported" if kind in _OTHER_PARTS else "the type of a part is unknown"
        raise InvalidArgument(where, f"{named}: Penstock's models read text, parts must have the type text")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}.text", "must be a text")
    return text
