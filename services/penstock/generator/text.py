"""Tokenizer of a model in this process: encoding, templates and decoding of the tokenizer service, without it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.generator.argument_names import ids_of, reading
from penstock.router.chat.formats import ChatFormat, choose_format
from penstock.text.detokenizer import SequenceDetokenizer
from penstock.text.text_decoder import TextDecoder
from penstock.text.thoughts import Thought
from penstock.text.token_text import TokenText
from penstock.tokenizer.bundle import TokenizerBundle
from penstock.tokenizer.chat_template import ChatTemplates, Conversation, Rendered
from penstock.tokenizer.detokenizer_factory import DetokenizerFactory
from penstock.tokenizer.template_process import Renderer, answer_to
from penstock.tokenizer.tokenizer import EncodeOptions, TextTokenizer, Vocabulary, clean_up

# Ids of a prompt that a decoder without a table sees: enough for a character, also between special tokens.
_MAX_CONTEXT_IDS = 64
# Any text of some token: its encoding shows the ids that the tokenizer puts in front.
_PROBE = "a"


class LocalTokenizer:
    """Text to ids and back, with transformers' results. Thread-safe: one call works at a time.

    Chat templates run in this process, in Jinja's sandbox: they are files of a model that the caller chose.
    """

    def __init__(self, bundle: TokenizerBundle, *, allow_control_tokens: bool = False) -> None:
        """Make it from a loaded folder. `allow_control_tokens`: text that spells one becomes it, as in transformers.

        Raises ValueError when control tokens cannot be kept apart from text.
        """
        self._allow_control_tokens = allow_control_tokens
        self._vocabulary = Vocabulary(bundle)
        self._text = TextTokenizer(self._vocabulary)
        self._templates = ChatTemplates(
            bundle.templates,
            bundle.special_tokens,
            self._vocabulary.marks,
            protect=not (allow_control_tokens or bundle.split_special_tokens),
        )
        # Made with the first chat: it imports parts of transformers.
        self._renderer: Renderer | None = None
        self._decoders = DetokenizerFactory(
            self._vocabulary.tokenizer,
            id_limit=bundle.id_limit,
            special_ids=self._vocabulary.special_ids,
            clean_up=clean_up if bundle.clean_up_tokenization_spaces else None,
        )
        self._lock = threading.Lock()
        self._token_texts: dict[int, TokenText] = {}
        self._front: list[int] | None = None

    def with_template(self, template: str) -> LocalTokenizer:
        """Return a tokenizer of the same vocabulary with `template`, a text in Jinja, as its only chat template."""
        bundle = replace(self._vocabulary.bundle, templates={"default": template})
        return LocalTokenizer(bundle, allow_control_tokens=self._allow_control_tokens)

    def special_id(self, token: str) -> int | None:
        """Return the id of an added token such as `<|eot_id|>`, or of one by its role, such as eos_token; else None."""
        named = self._vocabulary.special_id(token)
        if named is not None:
            return named
        added = self._vocabulary.tokenizer.get_added_tokens_decoder()
        return next((index for index, one in added.items() if one.content == token), None)

    def marker_ids(self, markers: Iterable[str]) -> dict[str, int]:
        """Return the ids of those markers that are added tokens."""
        return {marker: found for marker in markers if (found := self.special_id(marker)) is not None}

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included."""
        return self._vocabulary.size

    @property
    def eos_token_ids(self) -> list[int]:
        """End-of-sequence ids: the tokenizer's first, then those of generation_config.json."""
        return self._vocabulary.eos_ids

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token; None without one."""
        return self._vocabulary.special_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token; None without one."""
        return self._vocabulary.special_id("pad_token")

    @property
    def chat_template(self) -> str:
        """Text of the default chat template; empty without one."""
        return self._templates.default

    @overload
    def encode(  # type: ignore[overload-overlap]
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool | None = None
    ) -> list[int]: ...

    @overload
    def encode(
        self, text: Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool | None = None
    ) -> list[list[int]]: ...

    def encode(
        self, text: str | Sequence[str], *, add_special_tokens: bool = True, parse_special_tokens: bool | None = None
    ) -> list[int] | list[list[int]]:
        """Return the ids of a text, or of each of several. `parse_special_tokens` None: as the tokenizer was made."""
        with reading("text", "a text, or a list of texts"):
            texts = [text] if isinstance(text, str) else [*text]
            for one in texts:
                # Half a character is no text.
                str.encode(one)
        parse = self._allow_control_tokens if parse_special_tokens is None else parse_special_tokens
        options = EncodeOptions(add_special_tokens=add_special_tokens, parse_special_tokens=parse)
        with self._lock:
            encoded = self._text.encode(texts, options)
        found = [one.ids for one in encoded]
        return found[0] if isinstance(text, str) else found

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Raises InvalidArgument for ids outside the vocabulary."""
        with reading("token_ids", "a list of whole numbers from 0 on"):
            ids = ids_of(token_ids)
        with self._lock:
            return self._text.decode([ids], skip_special_tokens)[0]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation as the model's template writes it; `variables` are the template's own.

        Raises InvalidArgument when the template refuses it, FailedPrecondition without a template.
        """
        conversation = Conversation(
            [dict(message) for message in messages],
            [dict(tool) for tool in tools],
            [dict(document) for document in documents],
            add_generation_prompt,
            continue_final_message,
            variables,
        )
        return self.encode_chat(conversation)[1]

    def encode_chat(self, conversation: Conversation) -> tuple[str, list[int]]:
        """Return text and ids of a conversation. Raises as `apply_chat_template`."""
        if not self._templates.names:
            raise FailedPrecondition("the model has no chat template", reason="NO_CHAT_TEMPLATE")
        wanted = self._templates.request(conversation)
        with self._lock:
            if self._renderer is None:
                self._renderer = Renderer(self._templates.renderer_settings)
            rendered: Rendered = self._templates.result(wanted, answer_to(self._renderer, wanted))
            return rendered.text, self._text.encode_rendered(rendered.text, rendered.marked)

    @property
    def chat_format(self) -> ChatFormat:
        """Format of reasoning and tool calls, by the chat templates."""
        templates = self._templates
        told = self._vocabulary.bundle.response_template
        return choose_format(templates.default + templates.for_tools, response_template=told)

    def decoder(
        self,
        context: Sequence[int] | None,
        stop_strings: Sequence[str],
        *,
        skip_special: bool,
        include_stop: bool,
        kept: Sequence[str] = (),
        thought: Thought | None = None,
    ) -> TextDecoder:
        """Return the decoder of one sequence's output. `context`: the prompt that the text continues; None: it
        begins anew. `kept`: special tokens that are not skipped. `thought`: what comes before its stop strings count.
        Raises IndexError for a prompt's id outside the vocabulary."""
        made: SequenceDetokenizer = self._decoders.make(skip_special, kept)
        decoder = TextDecoder(made, stop_strings, include_stop, thought)
        if context is not None:
            end = self._end_of(context, skip_special)
            decoder.replay(end, (), is_cut=len(end) < len(context))
        return decoder

    def _end_of(self, context: Sequence[int], skip_special: bool) -> Sequence[int]:
        table = self._decoders.table
        return context[-_MAX_CONTEXT_IDS:] if table is None else table.context(context, skip_special)

    def token_text(self, token_id: int) -> TokenText:
        """Return the text of one token alone, special ones spelled out: for log-probabilities.

        Empty for an id that the tokenizer does not have: a model may have more rows.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            try:
                piece = self._decoders.piece(token_id)
            except IndexError:
                piece = b""
            text = self._token_texts[token_id] = TokenText.of(piece)
        return text

    def divide(self, prompt: str, continuation: str, *, beginning: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and of a continuation to score, cut as the router cuts them.

        The whole text is encoded, and the ids that it shares with the prompt's own encoding are the prompt.
        `beginning`: ids in place of a prompt without any. Raises InvalidArgument naming prompt or continuation.
        """
        if not continuation:
            raise InvalidArgument("continuation", "must not be empty")
        # White space at the prompt's end belongs to the continuation, since a token begins with its space.
        alone, whole = self.encode([prompt.rstrip(), prompt + continuation], add_special_tokens=False)
        pairs = zip(alone, whole, strict=False)
        common = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(alone), len(whole)))
        if common == len(whole):
            raise InvalidArgument("continuation", "must have at least one token")
        context = [*self._ids_in_front(), *whole[:common]] or list(beginning)
        if not context:
            raise InvalidArgument("prompt", "must have at least one token", reason="EMPTY_PROMPT")
        return context, whole[common:]

    def _ids_in_front(self) -> list[int]:
        if self._front is None:
            bare, dressed = self.encode(_PROBE, add_special_tokens=False), self.encode(_PROBE)
            starts = [begin for begin in range(len(dressed)) if dressed[begin : begin + len(bare)] == bare]
            self._front = dressed[: starts[0]] if starts else []
        return self._front
