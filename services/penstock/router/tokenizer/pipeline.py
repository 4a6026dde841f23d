"""Conversion of a client's prompt to ids: one call of the tokenizer, off this event loop, within the deadline."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.common.errors import Internal, InvalidArgument
from penstock.router.chat.call_block import Schemas
from penstock.router.chat.chat_output import prompt_opens_reasoning
from penstock.router.chat.forced_calls import answer_grammar, forced_grammar
from penstock.router.chat.formats import DEFAULT, ChatFormat, choose_format
from penstock.router.chat.held_calls import call_grammar_message, calls_beside_answer
from penstock.router.chat.prompt_thought import closing_text, thought_before, thought_end
from penstock.router.chat.thinking_effort import EFFORT, budget_of, switch_off, wished_budget
from penstock.router.config import RouterConfig
from penstock.router.tokenizer.tokenizer_link import TokenizerLink
from penstock.text.fill_in_middle import TOKENS, form_of
from penstock.v1 import common_pb2, config_pb2, generation_pb2, text_pb2, tokenizer_pb2


@dataclass(slots=True)
class Prompt:
    """A prompt as ids, with the seconds of each stage. A stage that did not run is None."""

    token_ids: list[int]
    # The client's text, for echo.
    text: str | None = None
    opens_reasoning: bool = False
    # Format of a chat's answer.
    chat: ChatFormat = DEFAULT
    # Thought before its answer; None: none.
    thought: common_pb2.Thought | None = None
    # What closes that thought, of a request with a budget of thinking.
    thought_end: generation_pb2.ThoughtEnd | None = None
    # What holds the calls that the model chooses to make; None: nothing.
    calls: generation_pb2.CallGrammar | None = None
    # Grammar of the calls that the answer must be.
    constraint: config_pb2.Constraint | None = None
    template_seconds: float | None = None
    tokenize_seconds: float | None = None
    # Control tokens that the client's text spells out and that stay text.
    spelled: tuple[str, ...] = ()


class Pipeline:
    """Makes prompts. Its only state is the format of chats; all handlers share it."""

    def __init__(self, link: TokenizerLink, config: RouterConfig) -> None:
        self._link = link
        self._config = config
        self._parse_special = config.allow_control_tokens_in_text
        self._chat_format: ChatFormat | None = None
        self._marker_ids: dict[str, int] | None = None
        self._closing_ids: list[int] | None = None
        self._efforts = config.effort_budgets
        # The fill-in-the-middle tokens that the tokenizer has.
        self._middle_ids: dict[str, int] | None = None

    @property
    def chat_format(self) -> ChatFormat:
        """Format of the model's chats, from its template: the tokenizer stays the same for the life of this process."""
        if self._chat_format is None:
            if self._link.info is None:
                return DEFAULT
            info, config = self._link.info, self._config
            self._chat_format = choose_format(
                info.chat_template + info.tool_template,
                config.tool_format,
                config.reasoning_format,
                response_template=info.response_template,
            )
        return self._chat_format

    @property
    def hides_tools(self) -> bool:
        """True when the model's chat template does not show tools."""
        return self._link.info is not None and self._link.info.hides_tools

    async def text(self, request: text_pb2.GenerateTextRequest, timeout: float | None) -> Prompt:
        """Return the prompt of Generate, empty without one. Raises InvalidArgument naming `prompt`, and as
        TokenizerLink.encode."""
        if request.WhichOneof("prompt") != "text":
            if not request.suffix:
                return Prompt(list(request.token_ids.ids))
            return await self._ids_before(request, timeout)
        begin = time.monotonic()
        add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        parse = request.parse_special_tokens if request.HasField("parse_special_tokens") else self._parse_special
        if request.suffix:
            texts = [request.text, request.suffix]
            first, last = await self._encode(texts, timeout, add_special=False, parse=parse, field="prompt")
            prefix, suffix = list(first.ids), list(last.ids)
            ids = await self._between(prefix, suffix, timeout, add_special=add_special)
            spelled = (*first.spelled_control_tokens, *last.spelled_control_tokens)
        else:
            (found,) = await self._encode([request.text], timeout, add_special=add_special, parse=parse, field="prompt")
            ids, spelled = list(found.ids), tuple(found.spelled_control_tokens)
        return Prompt(ids, text=request.text, tokenize_seconds=time.monotonic() - begin, spelled=spelled)

    async def _ids_before(self, request: text_pb2.GenerateTextRequest, timeout: float | None) -> Prompt:
        """Return a prompt for the text between ids and a text. Raises as `text`."""
        begin = time.monotonic()
        parse = request.parse_special_tokens if request.HasField("parse_special_tokens") else self._parse_special
        (last,) = await self._encode([request.suffix], timeout, add_special=False, parse=parse, field="suffix")
        # Ids are a prompt as they are: nothing is put before them unasked.
        ids = await self._between(
            list(request.token_ids.ids), list(last.ids), timeout, add_special=request.add_special_tokens
        )
        return Prompt(ids, tokenize_seconds=time.monotonic() - begin, spelled=tuple(last.spelled_control_tokens))

    async def _between(
        self, prefix: list[int], suffix: list[int], timeout: float | None, *, add_special: bool
    ) -> list[int]:
        """Return a prompt for the text between two others. Raises InvalidArgument if the model has no such prompts."""
        if self._middle_ids is None:
            self._middle_ids = await self._ids_of(TOKENS, timeout)
        form = form_of(self._middle_ids)
        (begin,) = await self._encode([""], timeout, add_special=add_special, parse=False, field="prompt")
        return form.arranged(self._middle_ids, begin.ids, prefix, suffix)

    async def _ids_of(self, tokens: Sequence[str], timeout: float | None) -> dict[str, int]:
        """Return the ids of the texts that are tokens. Raises as TokenizerLink.encode."""
        found = await self._encode(tokens, timeout, add_special=False, parse=True, field="prompt")
        info = self._link.info
        # Some tokenizers have one token for all unknown text.
        unknown = info.unk_token_id if info is not None and info.HasField("unk_token_id") else -1
        alone = {token: one.ids[0] for token, one in zip(tokens, found, strict=True) if len(one.ids) == 1}
        return {token: number for token, number in alone.items() if number != unknown}

    async def chat(self, request: text_pb2.ChatRequest, timeout: float | None) -> Prompt:
        """Return the prompt of Chat. Raises as TokenizerLink.apply_chat_template, naming the request's own fields."""
        _, budget = self._budget(request)
        answer = await self.render(request, timeout, thinks=budget != 0)
        # The first answer of the tokenizer tells the format.
        chat, (wished, budget) = self.chat_format, self._budget(request)
        prompt = Prompt(
            list(answer.token_ids),
            opens_reasoning=prompt_opens_reasoning(answer.text, chat.reasoning),
            chat=chat,
            thought=thought_before(chat, answer.text, goes_on=request.continue_final_message),
            template_seconds=answer.template_seconds,
            tokenize_seconds=answer.tokenize_seconds,
        )
        if prompt.thought is not None and budget is not None:
            if self._closing_ids is None:
                text = closing_text(chat)
                (found,) = await self._encode([text], timeout, add_special=False, parse=True, field="messages")
                self._closing_ids = list(found.ids)
            prompt.thought_end = thought_end(chat, prompt.thought, self._closing_ids, wished)
        return prompt

    def _budget(self, request: text_pb2.ChatRequest) -> tuple[int | None, int | None]:
        """Return the budgets of thinking that the request's effort wishes, and that it has."""
        variable = request.chat_template_kwargs.fields.get(EFFORT)
        effort = "" if variable is None else variable.string_value
        wished = wished_budget(self.chat_format, effort, self._efforts)
        return wished, budget_of(request.config, wished)

    async def render(
        self,
        request: text_pb2.ChatRequest | text_pb2.RenderChatRequest,
        timeout: float | None,
        *,
        thinks: bool = True,
    ) -> tokenizer_pb2.ApplyChatTemplateResponse:
        """Render a conversation and encode it; without `thinks` the template's own switch is off. Raises as `chat`."""
        ask = tokenizer_pb2.ApplyChatTemplateRequest(messages=request.messages)
        if request.tools:
            ask.tools.extend(request.tools)
        if request.documents:
            ask.documents.extend(request.documents)
        if request.HasField("add_generation_prompt"):
            ask.add_generation_prompt = request.add_generation_prompt
        if request.HasField("continue_final_message"):
            ask.continue_final_message = request.continue_final_message
        if request.HasField("chat_template_kwargs"):
            ask.chat_template_kwargs.CopyFrom(request.chat_template_kwargs)
        if not thinks:
            switch_off(ask)
        return await self._link.apply_chat_template(ask, timeout)

    async def force_calls(self, prompt: Prompt, schemas: Schemas, *, max_calls: int, timeout: float | None) -> None:
        """Set the prompt's `constraint`: calls of these tools. Raises as TokenizerLink.encode."""
        grammar = forced_grammar(
            prompt.chat,
            schemas,
            await self._ids_of_markers(prompt.chat, timeout),
            max_calls=max_calls,
            in_reasoning=prompt.opens_reasoning,
            may_think=prompt.thought is not None,
        )
        prompt.constraint = config_pb2.Constraint(grammar=grammar)

    async def hold_calls(
        self, prompt: Prompt, schemas: Schemas, strict: Collection[str], *, max_calls: int, timeout: float | None
    ) -> None:
        """Set the prompt's `calls`. Raises as TokenizerLink.encode."""
        markers = await self._ids_of_markers(prompt.chat, timeout)
        prompt.calls = call_grammar_message(prompt.chat, schemas, strict, markers, max_calls=max_calls)

    async def free_thought(self, prompt: Prompt, timeout: float | None) -> None:
        """Leave the prompt's thought out of the request's constraint. Raises as TokenizerLink.encode."""
        if prompt.thought is not None:
            markers = await self._ids_of_markers(prompt.chat, timeout)
            prompt.thought.grammar = answer_grammar(prompt.chat, markers, in_reasoning=prompt.opens_reasoning)

    async def calls_or_answer(
        self, prompt: Prompt, schemas: Schemas, strict: Collection[str], *, max_calls: int, timeout: float | None
    ) -> None:
        """Let the output be calls in place of the answer that the request's constraint is about. Raises as
        TokenizerLink.encode."""
        markers = await self._ids_of_markers(prompt.chat, timeout)
        prompt.calls = calls_beside_answer(
            prompt.chat,
            schemas,
            strict,
            markers,
            max_calls=max_calls,
            in_reasoning=prompt.opens_reasoning,
            may_think=prompt.thought is not None,
        )

    async def _ids_of_markers(self, chat: ChatFormat, timeout: float | None) -> dict[str, int]:
        """Ids of the markers that are one token each."""
        if self._marker_ids is None:
            self._marker_ids = await self._ids_of(chat.kept_for(with_tools=True), timeout)
        return self._marker_ids

    async def negative_prompt(self, config: config_pb2.GenerationConfig, timeout: float | None) -> None:
        """Replace `negative_prompt_text` of `config` with ids: generation takes no text."""
        if config.WhichOneof("negative_prompt") == "negative_prompt_text":
            text = config.negative_prompt_text
            (found,) = await self._encode(
                [text], timeout, add_special=True, parse=self._parse_special, field="config.negative_prompt_text"
            )
            config.negative_prompt_ids.CopyFrom(common_pb2.TokenIds(ids=found.ids))

    async def echo_text(self, prompt: Prompt, timeout: float | None, *, skip_special_tokens: bool) -> str:
        """Return the prompt as text: as sent, or the text of its ids up to an incomplete character."""
        if prompt.text is not None:
            return prompt.text
        sequences = [common_pb2.TokenIds(ids=prompt.token_ids)]
        request = tokenizer_pb2.DecodeRequest(
            sequences=sequences, skip_special_tokens=skip_special_tokens, without_open_end=True
        )
        answer = await self._link.decode(request, timeout)
        return answer.texts[0] if answer.texts else ""

    async def _encode(
        self, texts: Sequence[str], timeout: float | None, *, add_special: bool, parse: bool, field: str
    ) -> Sequence[tokenizer_pb2.Encoding]:
        request = tokenizer_pb2.EncodeRequest(texts=texts, add_special_tokens=add_special, parse_special_tokens=parse)
        try:
            answer = await self._link.encode(request, timeout)
        except InvalidArgument as error:
            # The error names a field of the tokenizer's request.
            raise InvalidArgument(field, error.description, reason=error.reason) from error
        if len(answer.encodings) != len(texts):
            raise Internal("the tokenizer did not answer every text", reason="TOKENIZER_PROTOCOL")
        return answer.encodings
