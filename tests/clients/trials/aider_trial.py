"""aider, unmodified: `aider --message` edits a file of a small repository and commits it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from trial import MODEL, URL, step

WORK = Path.cwd() / "work"
WORK.mkdir()


def run(*command: str) -> str:
    """Output of a command in the repository, which must end well."""
    settings = {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        command,
        cwd=WORK,
        env={**os.environ, **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-1500:]} {done.stderr[-1500:]}"
    return done.stdout


(WORK / "greet.py").write_text("def greet():\n    return 'hello'\n")
# A small model writes on and on otherwise.
(Path.home() / ".aider.model.settings.yml").write_text(
    f"- name: openai/{MODEL}\n  edit_format: diff\n  use_temperature: 0\n  extra_params: {{max_tokens: 200}}\n"
)
for arguments in (
    ("init", "-q"),
    ("config", "user.name", "A"),
    ("config", "user.email", "a@example.com"),
    ("add", "greet.py"),
    ("commit", "-qm", "Greet"),
):
    run("git", *arguments)
AIDER = ("aider", "--model", f"openai/{MODEL}", "--yes-always", "--no-check-update", "--no-show-model-warnings")
AIDER += ("--no-gitignore", "--no-auto-lint", "--map-tokens", "0", "--analytics-disable")


def edited(*flags: str) -> str:
    """Words of aider to a message, after which the file may have changed."""
    return run(*AIDER, *flags, "--message", "[play:edit] Greet with 'good day'.", "greet.py")


@step("aider --message: the edit is made and committed", only="scripted")
def _() -> Any:
    edited()
    assert (WORK / "greet.py").read_text() == "def greet():\n    return 'good day'\n", (WORK / "greet.py").read_text()
    assert len(run("git", "log", "--oneline").splitlines()) == 2, run("git", "log", "--oneline")
    return run("git", "log", "-1", "--format=%s").strip()


@step("aider --no-stream --message: the same edit", only="scripted")
def _() -> Any:
    run("git", "reset", "-q", "--hard", "HEAD~1")
    edited("--no-stream")
    assert "good day" in (WORK / "greet.py").read_text()
    return "edited"


@step("aider --message: it ends, whatever the model says", only="real")
def _() -> Any:
    said = edited()
    # It counts them, and tells of an answer that the limit cut.
    counted = [line for line in said.splitlines() if "tokens:" in line.lower()]
    assert counted, said[-500:]
    return counted[0]
