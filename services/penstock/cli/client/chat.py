"""`penstock chat`, a conversation in the terminal, and `penstock complete`, one text continued."""

from __future__ import annotations

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
from penstock.common.config import from_env_and_flags
from penstock.common.errors import PenstockError
from penstock.common.options import options_of

if TYPE_CHECKING:
    from penstock_client import Client

CHAT_EPILOG = f"""/reset forgets the conversation, /system TEXT gives instructions, /stats shows timings, /quit ends;
Ctrl-C stops an answer.

{ENV_NOTE}

Examples:

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

HELP = "/reset forgets the conversation, /system TEXT gives instructions, /stats shows timings, /quit ends"


def split_options(given: Overrides) -> tuple[ConnectionConfig, SamplingConfig]:
    """Split a client command's flags into its two configurations."""
    names = {bound.name for bound in options_of(ConnectionConfig)}
    connection = from_env_and_flags(ConnectionConfig, {n: v for n, v in given.items() if n in names})
    return connection, from_env_and_flags(SamplingConfig, {n: v for n, v in given.items() if n not in names})


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
    text = sys.stdin.read() if prompt == "-" else prompt
    with open_client(connection) as client:
        completion = stream_answer(client.stream(text, **sampling.request_options()))
    if completion is None:
        raise KeyboardInterrupt
    if sampling.stats:
        for line in (*warnings_of(completion), stats_line(completion)):
            complain(line)


def _complete(given: Overrides) -> None:
    run_complete(str(given.pop("prompt")), given)


_PROMPT = argument("prompt", "PROMPT", "Text to continue; - reads it from standard input.", default=...)
_OPTIONS = [*options_of(SamplingConfig), *options_of(ConnectionConfig)]
chat = typer.Typer(add_completion=False)
chat.command("chat", epilog=CHAT_EPILOG)(command(_OPTIONS, run_chat))
complete = typer.Typer(add_completion=False)
complete.command("complete", epilog=COMPLETE_EPILOG)(command(_OPTIONS, _complete, first=[_PROMPT]))
