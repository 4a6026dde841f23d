"""Conversation of `penstock infer --interactive`: the model sees the latest turns that fit the budget."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.client.answer import allow_any_text, stats_line, stream_answer, warnings_of
from penstock.cli.console import complain, console, lines_until, say
from penstock.cli.infer.config import AUTO, NONE, InferConfig, generation_config
from penstock.cli.infer.journal import json_list, write_whole
from penstock.cli.infer.prompts import Message, Prompter, has_template, with_terminators
from penstock.common.errors import PenstockError, StartupError
from penstock.common.options import options_of

if TYPE_CHECKING:
    from penstock.cli.infer.targets import TalkingTarget

HELP = """!help            shows this
!clear           forgets the conversation
!save [FILE]     writes it as [{Input, Output}]; by default to --predictions-file
!set NAME VALUE  sets an option of the next answers, such as: !set temperature 0.7
!set system TEXT gives instructions, and forgets the conversation
!status          shows the model, the options, and the part of the conversation that the next turn sees
!quit            ends, as does the end of input; Ctrl-C stops an answer"""


@dataclass(slots=True)
class Turn:
    """A question with its answer. `tokens`: tokens of both in the prompt of the next turn."""

    question: str
    answer: str
    tokens: int = 0


class TypedConversation:
    """Turns, options, and the user's commands on both."""

    def __init__(self, config: InferConfig, target: TalkingTarget) -> None:
        """Begin empty. Raises StartupError naming the flag of a wrong option or template."""
        self._config, self._target = config, target
        template = config.prompt_template
        tokenizer = target.tokenizer
        if template == AUTO and not config.with_prompt and tokenizer is not None and not has_template(tokenizer):
            # A base model completes the typed text, as in the script.
            template = NONE
        self._prompter = Prompter(template, config.system_prompt, tokenizer)
        self._options = with_terminators(config.asked_options(), tokenizer)
        self._turns: list[Turn] = []
        # Turns before this one are no longer seen.
        self._first = 0
        self.has_failed = False

    def run(self, read: Callable[[], str]) -> None:
        """Answer lines from `read` until !quit or EOFError."""
        for line in lines_until(read, "!quit"):
            (self._command if line.startswith("!") else self._ask)(line)

    # Commands.

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].partition(" ")
        known: dict[str, Callable[[str], None]] = {
            "help": lambda _: say(HELP),
            "clear": lambda _: self._clear(),
            "save": self._save,
            "set": self._set,
            "status": lambda _: self._status(),
        }
        if name not in known:
            complain(f"!{name} is unknown: !help lists the commands")
            return
        known[name](rest.strip())

    def _clear(self) -> None:
        self._turns.clear()
        self._first = 0

    def _save(self, name: str) -> None:
        path = Path(name or self._config.predictions_file).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json_list({"Input": one.question, "Output": one.answer} for one in self._turns))
        except OSError as error:
            complain(f"!save {path}: {error.strerror}")
            return
        say(f"{len(self._turns)} turns: {path}")

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name, value = name.removeprefix("--").replace("-", "_"), value.strip()
        if name == "system":
            self._prompter = Prompter(self._prompter.template, value, self._target.tokenizer)
            self._clear()
            return
        try:
            self._config = _changed(self._config, name, value)
            self._options = with_terminators(self._config.asked_options(), self._target.tokenizer)
        except (StartupError, ValueError) as error:
            complain(f"!set {name}: {error.message if isinstance(error, StartupError) else error}")

    def _status(self) -> None:
        seen = len(self._turns) - self._first
        tokens = sum(turn.tokens for turn in self._turns[self._first :])
        say(f"model    {self._target.name}, template {self._prompter.template}")
        budget = self._budget() or "?"
        say(f"turns    {len(self._turns)}; the next one sees {seen} of them ({tokens} tokens of {budget})")
        say(f"options  {json.dumps(generation_config(self._options), ensure_ascii=False)}")

    # Turns.

    def _ask(self, question: str) -> None:
        try:
            self._trim(question)
            prompt = self._prompter.of_messages(self._messages(question))
            completion = stream_answer(self._target.stream(prompt, self._options))
        except PenstockError as error:
            # The conversation continues without the failed question.
            complain(f"{error.code.name}: {error.message}")
            self.has_failed = True
            return
        if completion is None:
            return
        usage = completion.usage
        before = sum(turn.tokens for turn in self._turns[self._first :])
        tokens = usage.prompt_tokens + usage.completion_tokens - before
        self._turns.append(Turn(question, completion.text.strip(), max(tokens, 0)))
        if self._config.stats:
            for text in (*warnings_of(completion), stats_line(completion)):
                console().print(text, style="dim", markup=False)

    def _messages(self, question: str) -> list[Message]:
        messages: list[Message] = []
        for turn in self._turns[self._first :]:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return [*messages, {"role": "user", "content": question}]

    def _budget(self) -> int | None:
        """Tokens that the prompt may have; None: not known."""
        if self._config.history_tokens is not None:
            return self._config.history_tokens
        context = self._target.context
        return None if context is None else max(context - (self._options.get("max_new_tokens") or 0), 1)

    def _trim(self, question: str) -> None:
        """Leave out the oldest turns until the prompt fits the budget. The question itself always stays."""
        budget, before = self._budget(), self._first
        while budget is not None and self._first < len(self._turns):
            tokens = self._prompter.count(self._messages(question))
            if tokens is None:
                # The endpoint's tokenizer counts: its count of the earlier turns.
                tokens = sum(turn.tokens for turn in self._turns[self._first :])
            if tokens <= budget:
                break
            self._first += 1
        if self._first > before:
            console().print(f"({self._first - before} old turns are no longer seen)", style="dim")


def _changed(config: InferConfig, name: str, value: str) -> InferConfig:
    """Return `config` with an option set. Raises ValueError with what was expected, StartupError."""
    bound = {one.name: one for one in options_of(InferConfig)}.get(name)
    if bound is None:
        raise ValueError("is no option")
    parsed: Any = bound.parse(value)
    bound.check(parsed)
    return dataclasses.replace(config, **{name: parsed})


def converse(config: InferConfig, target: TalkingTarget) -> int:
    """Converse until the end of input, and return the exit code: 1 if a question failed and input is no terminal."""
    allow_any_text()
    is_person = sys.stdin.isatty()
    conversation = TypedConversation(config, target)
    if is_person:
        import readline  # noqa: F401  # line editing and history for input()

        console().print(f"{target.name}; !help lists the commands", style="dim")
    conversation.run(lambda: input("› " if is_person else ""))
    return int(conversation.has_failed and not is_person)
