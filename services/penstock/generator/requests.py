"""A caller's prompt and options as the request that the generation service gets, and what its text depends on.

Options travel as messages here, though nothing is sent: names, forms and errors are those of `penstock_client` and of
the service, by the very code of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock_client._options import chat_request, generate_request, is_conversation

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.common.hf_fields import FACTS, WITHOUT_EFFECT, is_nothing
from penstock.generation.core.plugins import NO_OBJECTS, CallerObjects
from penstock.generator.argument_names import ids_of, reading
from penstock.generator.text import LocalTokenizer
from penstock.router.chat.call_block import Schemas
from penstock.router.chat.chat_output import ChatParser, make_parser, prompt_opens_reasoning
from penstock.router.chat.forced_calls import answer_grammar
from penstock.router.chat.formats import DEFAULT, ChatFormat
from penstock.router.chat.held_calls import call_grammar_message, calls_beside_answer
from penstock.router.chat.prompt_thought import closing_text, thought_before, thought_end
from penstock.router.chat.thinking_effort import budget_of, switch_off
from penstock.router.frontend.convert import (
    begin_prompt,
    may_call_in_place,
    schemas_of,
    skips_special_tokens,
    strict_tools,
    to_template,
)
from penstock.router.tokenizer.pipeline import Prompt
from penstock.text.fill_in_middle import TOKENS, form_of
from penstock.tokenizer.convert import conversation
from penstock.v1 import common_pb2, generation_pb2, model_pb2, text_pb2, tokenizer_pb2

# Calls of one answer in a block; the router's --max-tool-calls.
_MOST_CALLS = 32
# One prompt: a text, ids, or a conversation of {"role", "content"} mappings.
PromptInput: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"


@dataclass(frozen=True, slots=True)
class ChatExtras:
    """Tools, documents and template variables of a conversation."""

    tools: Iterable[Mapping[str, Any]] = ()
    documents: Iterable[Mapping[str, str]] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None


NO_EXTRAS = ChatExtras()


@dataclass(slots=True)
class LocalRequest:
    """A request for the engine in this process, and facts for its answer."""

    message: generation_pb2.GenerateRequest
    # Prompt that the text goes on with; None: it begins anew, as in a chat.
    context: list[int] | None
    # Text that every answer begins with.
    echo: str = ""
    skip_special: bool = True
    # Set in a chat.
    parses_tools: bool = False
    opens_reasoning: bool = False
    chat: ChatFormat = DEFAULT
    thought: common_pb2.Thought | None = None
    schemas: Schemas = field(default_factory=dict)
    is_chat: bool = False
    stop_strings: list[str] = field(default_factory=list)
    include_stop: bool = False
    # Objects of the caller, and warnings about arguments of the call.
    own: CallerObjects = NO_OBJECTS
    warnings: tuple[str, ...] = ()
    # The caller's own names of fields, where an argument stands for another one.
    names: Mapping[str, str] = field(default_factory=dict)

    def parser(self) -> ChatParser | None:
        """Return a parser of one answer's reasoning and tool calls; None where it is no chat."""
        if not self.is_chat:
            return None
        return make_parser(
            self.chat, parse_tools=self.parses_tools, in_reasoning=self.opens_reasoning, schemas=self.schemas
        )

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""
        return self.chat.kept_for(with_tools=self.parses_tools) if self.is_chat else ()


def is_batch(prompt: Any) -> bool:
    """True for several prompts, False for one: a text, ids, or a conversation."""
    if isinstance(prompt, str | Mapping):
        return False
    if not isinstance(prompt, Sequence) and not hasattr(prompt, "__getitem__"):
        # An iterator or a generator.
        return True
    return len(prompt) == 0 or isinstance(prompt[0], str | Sequence) or _has_rows(prompt)


def _has_rows(prompt: Any) -> bool:
    """True for an array of more than one dimension."""
    return len(getattr(prompt, "shape", ())) > 1


def keyword_options(config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` over those of `config`: transformers' GenerationConfig, a mapping, or None.

    Fields of it that are unset, or facts about the file, are left out. Raises TypeError for another configuration.
    """
    if config is None:
        return dict(options)
    if not isinstance(config, Mapping) and not hasattr(config, "to_diff_dict"):
        raise TypeError(
            "generation_config: must be transformers' GenerationConfig or a mapping of options, found "
            f"{type(config).__name__}"
        )
    fields = dict(config) if isinstance(config, Mapping) else config.to_diff_dict()
    known = {name: value for name, value in fields.items() if value is not None and name not in FACTS}
    # transformers' own words for nothing at all.
    kept = WITHOUT_EFFECT.keys() | {"do_sample"}
    asked = {name: value for name, value in known.items() if name in kept or not is_nothing(value)}
    return {**asked, **options}


class RequestMaker:
    """Maker of requests for one model. Thread-safe as its tokenizer is."""

    def __init__(self, tokenizer: LocalTokenizer | None, bos_token_id: int | None) -> None:
        """`tokenizer` None: prompts are ids. `bos_token_id`: an empty prompt begins with it."""
        self._tokenizer = tokenizer
        self._info = model_pb2.GetModelInfoResponse(bos_token_id=bos_token_id)

    def make(self, prompt: PromptInput, options: Mapping[str, Any], extras: ChatExtras = NO_EXTRAS) -> LocalRequest:
        """Return the request for one prompt. Raises TypeError and ValueError naming an option, and PenstockError."""
        if is_conversation(prompt):
            return self._chat(prompt, options, extras)
        with reading("prompt", "a text, a list of ids, from 0 to 4294967295, or a list of messages"):
            ids = prompt if isinstance(prompt, str) else ids_of(prompt)
        request = generate_request(ids, options)
        made = Prompt(list(request.token_ids.ids))
        if request.WhichOneof("prompt") == "text":
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            made = Prompt(self._prompt_ids(request, add_special=add_special), text=request.text)
        begin_prompt(made, request, self._info)
        context = None if self._tokenizer is None else made.token_ids
        local = self._local(request, made, context)
        if request.output.echo and self._tokenizer is not None:
            text = self._tokenizer.decode(made.token_ids, skip_special_tokens=local.skip_special)
            local.echo = text if made.text is None else made.text
        return local

    def _chat(self, messages: Any, options: Mapping[str, Any], extras: ChatExtras) -> LocalRequest:
        request = chat_request(messages, extras.tools, extras.documents, extras.chat_template_kwargs, options)
        if request.output.echo:
            raise InvalidArgument("output.echo", "is available for texts and ids only")
        ask = tokenizer_pb2.ApplyChatTemplateRequest(
            messages=request.messages,
            tools=request.tools,
            documents=request.documents,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        for name in ("add_generation_prompt", "continue_final_message"):
            if request.HasField(name):
                setattr(ask, name, getattr(request, name))
        if budget_of(request.config, None) == 0:
            switch_off(ask)
        text, ids = self._needed("a conversation").encode_chat(conversation(ask))
        local = self._local(request, Prompt(ids), None)
        local.is_chat, local.parses_tools = True, bool(request.tools)
        local.chat, local.schemas = self._needed("a conversation").chat_format, schemas_of(request)
        local.opens_reasoning = prompt_opens_reasoning(text, local.chat.reasoning)
        local.thought = thought_before(local.chat, text, goes_on=request.continue_final_message)
        if local.thought is not None:
            if request.HasField("constraint") and not may_call_in_place(request):
                markers = self._needed("a conversation").marker_ids(local.chat.kept_for(with_tools=True))
                local.thought.grammar = answer_grammar(local.chat, markers, in_reasoning=local.opens_reasoning)
            local.message.thought.CopyFrom(local.thought)
            if request.config.HasField("thinking_budget_tokens"):
                closing = self._needed("a conversation").encode(
                    closing_text(local.chat), add_special_tokens=False, parse_special_tokens=True
                )
                local.message.thought_end.CopyFrom(thought_end(local.chat, local.thought, closing, None))
        is_either = may_call_in_place(request)
        if local.parses_tools and (is_either or not request.HasField("constraint")):
            markers = self._needed("a conversation").marker_ids(local.chat.kept_for(with_tools=True))
            tools = local.chat, local.schemas, strict_tools(request), markers
            if is_either:
                is_open, may_think = local.opens_reasoning, local.thought is not None
                calls = calls_beside_answer(*tools, max_calls=_MOST_CALLS, in_reasoning=is_open, may_think=may_think)
            else:
                calls = call_grammar_message(*tools, max_calls=_MOST_CALLS)
            local.message.calls.CopyFrom(calls)
        return local

    def _local(
        self, request: text_pb2.GenerateTextRequest | text_pb2.ChatRequest, prompt: Prompt, context: list[int] | None
    ) -> LocalRequest:
        config = request.config
        if config.WhichOneof("negative_prompt") == "negative_prompt_text":
            ids = self._encode(config.negative_prompt_text, add_special=True)
            config.negative_prompt_ids.CopyFrom(common_pb2.TokenIds(ids=ids))
        message = to_template(
            request,
            prompt,
            model=request.model,
            adapter=request.adapter,
            salt=request.cache_salt,
            key="",
            fingerprint="",
        )
        message.request_id = request.request_id
        return LocalRequest(
            message,
            context,
            skip_special=skips_special_tokens(request),
            stop_strings=list(request.stop.stop_strings),
            include_stop=request.stop.include_stop_string_in_output,
        )

    def _prompt_ids(self, request: text_pb2.GenerateTextRequest, *, add_special: bool) -> list[int]:
        """Return the ids of a prompt's text, with the answer's place between it and a suffix where there is one."""
        tokenizer = self._needed("a text")
        parse = request.parse_special_tokens if request.HasField("parse_special_tokens") else None
        if not request.suffix:
            return tokenizer.encode(request.text, add_special_tokens=add_special, parse_special_tokens=parse)
        known = {token: found for token in TOKENS if (found := tokenizer.special_id(token)) is not None}
        form = form_of(known)
        prefix, suffix = tokenizer.encode(
            [request.text, request.suffix], add_special_tokens=False, parse_special_tokens=parse
        )
        return form.arranged(known, tokenizer.encode("", add_special_tokens=add_special), prefix, suffix)

    def _encode(self, text: str, *, add_special: bool) -> list[int]:
        return self._needed("a text").encode(text, add_special_tokens=add_special)

    def _needed(self, what: str) -> LocalTokenizer:
        if self._tokenizer is None:
            raise FailedPrecondition(
                f"{what} needs the tokenizer, which is not loaded: send ids", reason="NO_TOKENIZER"
            )
        return self._tokenizer
