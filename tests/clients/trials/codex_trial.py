"""OpenAI's codex, unmodified: `codex exec` by a provider with wire_api responses, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from trial import MODEL, QUESTION, URL, holds, step

HOME = Path.cwd() / "codex"
WORK = Path.cwd() / "work"
HOME.mkdir()
WORK.mkdir()
(WORK / "greeting.txt").write_text("hello from the shell\n")
(HOME / "config.toml").write_text(
    f"""model = "{MODEL}"
model_provider = "penstock"
model_context_window = 128000

[model_providers.penstock]
name = "Penstock"
base_url = "{URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
)


def codex(*arguments: str) -> list[dict[str, Any]]:
    """Events of `codex exec`."""
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    command = ["codex", "exec", *arguments[:-1], *flags, arguments[-1]]
    done = subprocess.run(
        command,
        cwd=WORK,
        env={**os.environ, "CODEX_HOME": str(HOME)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, f"{events[-3:]} {done.stderr[-1000:]}"
    return events


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Items of a kind that were completed."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


@step("codex exec: an answer")
def _() -> Any:
    return holds(items(codex(QUESTION), "agent_message")[-1]["text"])


@step("codex exec: it runs a command, and answers its output", only="scripted")
def _() -> Any:
    events = codex("[play:shell] What does greeting.txt say?")
    (run,) = items(events, "command_execution")
    assert run["exit_code"] == 0, run
    assert run["aggregated_output"] == "hello from the shell\n", run
    holds(items(events, "agent_message")[-1]["text"], "The file says hello from the shell.")
    return f"{run['command']}: {run['aggregated_output'].strip()}"


@step("codex exec resume --last: the conversation goes on", only="scripted")
def _() -> Any:
    return holds(items(codex("resume", "--last", "[play:plain] And?"), "agent_message")[-1]["text"])
