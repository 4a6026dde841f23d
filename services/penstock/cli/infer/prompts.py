"""Prompts of `penstock infer`: the lines of a file, put into a template."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.infer.config import AUTO, CHAT, LLAMA3, NONE
from penstock.common.errors import StartupError
from penstock.compat.inference_hf import END_OF_TURN, LLAMA3_TEMPLATE, LLAMA3_TOKENS, SAMPLES, llama3_text

if TYPE_CHECKING:
    from penstock.generator.text import LocalTokenizer

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, without surrounding space. `problem`: the reason it is not a prompt; None for a prompt."""

    # From 1.
    number: int
    text: str
    problem: str | None = None

    @property
    def digest(self) -> str:
        """Digest by which a journal identifies the line."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class PromptFile:
    """Prompts, one on each line; each iteration reads the file again, so a file of any length takes no memory."""

    def __init__(self, path: str | None) -> None:
        """`path` None: the samples. Raises StartupError naming --data-file when it cannot be read."""
        self._path = None if path is None else Path(path).expanduser()
        try:
            self.total = sum(1 for _ in self)
        except OSError as error:
            raise StartupError(f"--data-file {path}: {error.strerror}", flag="--data-file") from error

    def __iter__(self) -> Iterator[Line]:
        if self._path is None:
            yield from (Line(number, text) for number, text in enumerate(SAMPLES, 1))
            return
        # A byte that is not UTF-8 becomes a lone surrogate: only its line is bad.
        with self._path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            for number, text in enumerate(file, 1):
                yield _line(number, text.strip())


def _line(number: int, text: str) -> Line:
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return Line(number, shown, "it is not UTF-8")
    return Line(number, text)


@dataclass(frozen=True, slots=True)
class AskedPrompt:
    """Input of one request: a text, ids, or messages."""

    asked: str | list[int] | list[Message]


class Prompter:
    """Maker of prompts from one template."""

    def __init__(self, template: str, system_prompt: str, tokenizer: LocalTokenizer | None) -> None:
        """`template`: one of --prompt-template. `tokenizer` None: an endpoint's tokenizer writes the template.

        Raises StartupError naming --prompt-template if the tokenizer lacks the template's tokens.
        """
        self._system: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.template = template
        has_tokens = tokenizer is not None and _has_llama3_tokens(tokenizer)
        if template == AUTO:
            self.template = LLAMA3 if has_tokens else CHAT
        self._tokenizer = tokenizer
        if self.template == LLAMA3:
            if tokenizer is None or not has_tokens:
                why = (
                    "its tokenizer has no <|start_header_id|>" if tokenizer else "give its tokenizer: --tokenizer-path"
                )
                raise StartupError(f"--prompt-template llama3: {why}", flag="--prompt-template")
            self._tokenizer = tokenizer.with_template(LLAMA3_TEMPLATE)
            # As the script's tokenizer does with the text of its template.
            self._front = [one for one in tokenizer.encode("")[:1] if one == tokenizer.bos_token_id]
        elif self.template == CHAT and tokenizer is not None and not tokenizer.chat_template:
            told = "the model has no chat template: leave --with-prompt out, or give --prompt-template llama3 or none"
            raise StartupError(told, flag="--prompt-template")

    def of_line(self, line: str) -> AskedPrompt:
        """Return the prompt of one line of a file: in the template, after the system prompt."""
        return self.of_messages([{"role": "user", "content": line}])

    def of_messages(self, messages: Sequence[Message]) -> AskedPrompt:
        """Return the prompt of a conversation; with template none, of its last message alone."""
        if self.template == NONE:
            return AskedPrompt(messages[-1]["content"])
        whole = [*self._system, *messages]
        if self.template != LLAMA3:
            return AskedPrompt(whole)
        assert self._tokenizer is not None
        return AskedPrompt([*self._front, *self._tokenizer.apply_chat_template(whole)])

    def text_of(self, line: str) -> str:
        """Return the text of a line in the script's template; empty when the model's own template writes it."""
        if self.template != LLAMA3:
            return ""
        whole = [*self._system, {"role": "user", "content": line}]
        return llama3_text(whole)

    def count(self, messages: Sequence[Message]) -> int | None:
        """Return the tokens of a conversation; None when only the endpoint's tokenizer knows them."""
        if self._tokenizer is None:
            return None
        if self.template == NONE:
            return len(self._tokenizer.encode(messages[-1]["content"]))
        return len(self._tokenizer.apply_chat_template([*self._system, *messages]))


def has_template(tokenizer: LocalTokenizer) -> bool:
    """True when the tokenizer can write the template that auto means."""
    return bool(tokenizer.chat_template) or _has_llama3_tokens(tokenizer)


def _has_llama3_tokens(tokenizer: LocalTokenizer) -> bool:
    return all(tokenizer.special_id(one) is not None for one in LLAMA3_TOKENS)


def terminators(tokenizer: LocalTokenizer) -> list[int]:
    """Return the ids that end an answer, each once: the tokenizer's end of sequence and <|eot_id|>, as in the script.
    Without <|eot_id|>: the tokenizer's end of sequence and those of the model's generation_config.json."""
    end, turn = tokenizer.special_id("eos_token"), tokenizer.special_id(END_OF_TURN)
    if turn is None:
        return tokenizer.eos_token_ids
    return list(dict.fromkeys(one for one in (end, turn) if one is not None))


def with_terminators(options: dict[str, Any], tokenizer: LocalTokenizer | None) -> dict[str, Any]:
    """Return `options` with the ids that end an answer, unless they name some themselves."""
    ends = [] if tokenizer is None else terminators(tokenizer)
    return {"eos_token_id": ends, **options} if ends else options
