"""`penstock chat`, a question or a conversation in the terminal, and `penstock complete`, one text continued."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from penstock.cli.client.answer import allow_any_text, stats_line, stream_answer, warnings_of
from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.console import complain, console, lines_until
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.common.config import TransportConfig, from_env_and_flags
from penstock.common.errors import PenstockError, StartupError
from penstock.common.options import options_of
from penstock.common.units import format_size

if TYPE_CHECKING:
    from penstock_client import Client, Completion

CHAT_EPILOG = f"""With a QUESTION it is answered once. A file or a pipe as standard input is then added to the question;
- alone is that text as the question. Without a QUESTION it is a conversation, a line each:
/reset forgets the conversation, /system TEXT gives instructions, /stats shows timings, /quit ends;
Ctrl-C stops an answer.

{ENV_NOTE}

Examples:

  penstock chat "What is Penstock?"

  cat notes.txt | penstock chat "Summarise this." --max-new-tokens 100

  penstock chat --stats

  penstock chat --do-sample --temperature 0.8 --min-p 0.05 --seed 1

  penstock chat --address gpu-box:50050 --tls-ca ca.pem --token-file token"""
COMPLETE_EPILOG = f"""{ENV_NOTE}

Examples:

  penstock complete "The capital of France is" --max-new-tokens 16

  git log -1 | penstock complete - --temperature 0 --stop '.'

  penstock complete "Dear" --num-beams 4 --length-penalty 0.8 --no-repeat-ngram-size 3

  penstock complete "The Eiffel Tower" --penalty-alpha 0.6 --top-k 4

  penstock complete "Repeat: one two three" --prompt-lookup-num-tokens 5 --stats

  penstock complete "A cheerful poem:" --guidance-scale 1.5 --negative-prompt "A sad poem:"

  penstock complete "A person as JSON:" --json-schema @person.json

  penstock complete "Is water wet?" --choice yes --choice no

  penstock complete "Once" --option 'bad_words_ids=[[5], [6, 7]]'"""

# Standard input that is longer would fit no message.
STDIN_BYTES = TransportConfig.max_message_bytes
HELP = "/reset forgets the conversation, /system TEXT gives instructions, /stats shows timings, /quit ends"


def split_options(given: Overrides) -> tuple[ConnectionConfig, SamplingConfig]:
    """Split a client command's flags into its two configurations."""
    names = {bound.name for bound in options_of(ConnectionConfig)}
    connection = from_env_and_flags(ConnectionConfig, {n: v for n, v in given.items() if n in names})
    return connection, from_env_and_flags(SamplingConfig, {n: v for n, v in given.items() if n not in names})


def run_question(question: str, given: Overrides) -> None:
    """Answer one question with what a file or a pipe as standard input has; statistics go to standard error.

    Raises PenstockError, StartupError.
    """
    connection, sampling = split_options(given)
    allow_any_text()
    text = _asked(question)
    with open_client(connection) as client:
        completion = stream_answer(client.stream([{"role": "user", "content": text}], **sampling.request_options()))
    _complain_stats(completion, sampling)


def _asked(question: str) -> str:
    """Return the question and the text from standard input. Raises StartupError if there is none of either."""
    piped = _piped_text("QUESTION") if question == "-" or _is_piped() else ""
    text = piped if question == "-" else "\n\n".join(part for part in (question, piped) if part.strip())
    if not text.strip():
        raise StartupError("QUESTION is empty, and standard input has no text", flag="QUESTION")
    return text


def _is_piped() -> bool:
    """True when standard input is a file or a pipe. Others, as an open socket of a service, may never end."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or a test's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _piped_text(flag: str) -> str:
    """Return standard input. Raises StartupError naming `flag` when it is longer than a message, or is not UTF-8."""
    data = sys.stdin.buffer.read(STDIN_BYTES + 1)
    if len(data) > STDIN_BYTES:
        raise StartupError(f"standard input is longer than {format_size(STDIN_BYTES)}, the largest message", flag=flag)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise StartupError("standard input is not UTF-8 text", flag=flag) from error


def run_chat(given: Overrides) -> None:
    """Converse until /quit or the end of input. Raises StartupError when no server answers.

    The exit code is 1 if a question failed and the input is no terminal, since then nobody reads along.
    """
    connection, sampling = split_options(given)
    allow_any_text()
    with open_client(connection) as client:
        if sys.stdin.isatty():
            import readline  # noqa: F401  # line editing and history for input()

            console().print(f"connected to {connection.address}; {HELP}", style="dim")
        session = ChatSession(client, sampling)
        session.run(lambda: input("› " if sys.stdin.isatty() else ""))
    if session.has_failed and not sys.stdin.isatty():
        raise SystemExit(1)


@dataclass
class ChatSession:
    """Messages so far, and the user's commands on them."""

    client: Client
    sampling: SamplingConfig
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    show_stats: bool = False
    # True: some question had no answer.
    has_failed: bool = False

    def __post_init__(self) -> None:
        self.show_stats = self.sampling.stats

    def run(self, read: Callable[[], str]) -> None:
        """Answer lines from `read` until /quit or EOFError."""
        for line in lines_until(read, "/quit"):
            (self._command if line.startswith("/") else self._ask)(line)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/reset":
            self.messages.clear()
        elif name == "/system":
            self.system = rest.strip()
            self.messages.clear()
        elif name == "/stats":
            self.show_stats = not self.show_stats
        else:
            console().print(HELP, style="dim")

    def _ask(self, line: str) -> None:
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            completion = stream_answer(self.client.stream([*system, *asked], **self.sampling.request_options()))
        except PenstockError as error:
            # The conversation continues without the failed question.
            complain(f"{error.code.name}: {error.message}")
            self.has_failed = True
            return
        if completion is None:
            return
        self.messages = [*asked, {"role": "assistant", "content": completion.text}]
        if self.show_stats:
            for text in (*warnings_of(completion), stats_line(completion)):
                console().print(text, style="dim", markup=False)


def run_complete(prompt: str, given: Overrides) -> None:
    """Stream the continuation; statistics go to standard error. Raises PenstockError, StartupError."""
    connection, sampling = split_options(given)
    allow_any_text()
    text = _piped_text("PROMPT") if prompt == "-" else prompt
    with open_client(connection) as client:
        completion = stream_answer(client.stream(text, **sampling.request_options()))
    _complain_stats(completion, sampling)


def _complain_stats(completion: Completion | None, sampling: SamplingConfig) -> None:
    """Write warnings and statistics to standard error if they are wanted. Raises KeyboardInterrupt for an answer that
    was stopped."""
    if completion is None:
        raise KeyboardInterrupt
    if sampling.stats:
        for line in (*warnings_of(completion), stats_line(completion)):
            complain(line)


def _chat(given: Overrides) -> None:
    question = given.pop("question", None)
    if question is None:
        run_chat(given)
    else:
        run_question(str(question), given)


def _complete(given: Overrides) -> None:
    run_complete(str(given.pop("prompt")), given)


_PROMPT = argument("prompt", "PROMPT", "Text to continue; - reads it from standard input.", default=...)
_QUESTION = argument("question", "[QUESTION]", "Question to answer once; - reads it from standard input.")
_OPTIONS = [*options_of(SamplingConfig), *options_of(ConnectionConfig)]
chat = typer.Typer(add_completion=False)
chat.command("chat", epilog=CHAT_EPILOG)(command(_OPTIONS, _chat, first=[_QUESTION]))
complete = typer.Typer(add_completion=False)
complete.command("complete", epilog=COMPLETE_EPILOG)(command(_OPTIONS, _complete, first=[_PROMPT]))
