"""Command `penstock complete`: one text continued on standard output."""

from __future__ import annotations

import sys

from penstock.cli.client.answer import allow_any_text, stats_line, stream_answer, warnings_of
from penstock.cli.client.chat import split_options
from penstock.cli.client.connection import open_client
from penstock.cli.console import complain
from penstock.cli.flags import Overrides


def run_complete(prompt: str, given: Overrides) -> None:
    """Stream the continuation; statistics go to standard error. Raises PenstockError, StartupError."""
    connection, sampling = split_options(given)
    allow_any_text()
    text = sys.stdin.read() if prompt == "-" else prompt
    with open_client(connection) as client:
        completion = stream_answer(client.generate(text, **sampling.request_options()))
    if completion is None:
        raise KeyboardInterrupt
    if sampling.stats:
        for line in (*warnings_of(completion), stats_line(completion)):
            complain(line)
