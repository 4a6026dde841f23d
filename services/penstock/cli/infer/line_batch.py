"""Batch of `penstock infer`: the predictions hold an answer or an error for every line of a file; no line is lost."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import complain, say
from penstock.cli.infer.config import InferConfig, check_asked, generation_config
from penstock.cli.infer.journal import Journal, json_list, write_whole
from penstock.cli.infer.prompts import AskedPrompt, Line, Prompter, PromptFile, with_terminators
from penstock.cli.progress_display import LINE_SECONDS
from penstock.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PenstockError,
    ResourceExhausted,
    StartupError,
)

if TYPE_CHECKING:
    from penstock.cli.infer.targets import Answer, Target
    from penstock.generator.ordered_batch import BatchProgress

# Exit code of a complete run with lines that have an error in place of an answer.
SOME_FAILED = 3
# Errors of a request, which another try would repeat. Any other error is the engine's, and ends the run.
_OF_THE_LINE = (FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, TypeError, ValueError)
# Fields of a request that are the same for every line.
_COMMON_FIELDS = ("config.", "stop.", "output.", "model", "adapter")
# Bad lines that are named at the end.
_MOST_NAMED = 20
_SEEDS = 2**63


class BatchFiles:
    """Files and options of a run, checked before a model is loaded, which takes long."""

    def __init__(self, config: InferConfig) -> None:
        """Open them. Raises StartupError naming the flag of one that cannot be opened, or of a wrong option."""
        self.path = Path(config.predictions_file).expanduser()
        flag = "--predictions-file"
        if self.path.is_dir() or not self.path.name:
            raise StartupError(f"{flag} {config.predictions_file} is a folder: name a file", flag=flag)
        above = next(one for one in self.path.absolute().parents if one.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise StartupError(f"{flag} {config.predictions_file}: {above} is not a folder to write into", flag=flag)
        self.lines = PromptFile(config.data_file)
        check_asked(config.asked_options())


class LineBatch:
    """A run over a file of prompts."""

    def __init__(self, config: InferConfig, target: Target, files: BatchFiles | None = None) -> None:
        """Open the files, unless they are given. Raises StartupError naming the flag of one that cannot be opened."""
        self._config, self._target = config, target
        files = files or BatchFiles(config)
        self._path, self._lines = files.path, files.lines
        self._prompter = (
            Prompter(config.prompt_template, config.system_prompt, target.tokenizer) if config.with_prompt else None
        )
        options = with_terminators(config.asked_options(), target.tokenizer)
        # As in the script: without a template the answer continues its line, with one it stands alone.
        self._options = options if self._prompter else {"echo": True, **options}
        self._seed = self._base_seed()
        self._journal = Journal(self._path, self._settings(), resume=config.resume)
        # True: a line was answered, so the settings that all lines share are not at fault for an error.
        self._has_answer = len(self._journal) > 0

    def _base_seed(self) -> int | None:
        """Return the seed of all the lines' seeds: --seed, the one of an interrupted run, or a new one."""
        given: int | None = self._config.seed
        if given is not None or not self._options.get("do_sample"):
            return given
        left = Journal.settings_in(self._path) if self._config.resume else {}
        return int(left["seed"]) if left.get("seed") is not None else secrets.randbelow(_SEEDS)

    def _settings(self) -> dict[str, Any]:
        """Return the settings that decide the answers, in JSON's types."""
        template = None if self._prompter is None else self._prompter.template
        options = {name: _plain(value) for name, value in self._options.items() if name != "seed"}
        decided = {"options": options, "seed": self._seed, "template": template, "facts": _plain(self._target.facts)}
        return {**decided, "system_prompt": self._config.system_prompt if template else None}

    def run(self) -> int:
        """Answer the lines that the journal lacks, write the files, and return the exit code.

        Raises PenstockError when the engine ends; the journal has the lines done by then.
        """
        # Imports rich on a terminal.
        from penstock.generator.progress_bar import BatchReport

        total, resumed = self._lines.total, len(self._journal)
        if resumed:
            complain(f"{self._journal.path} has {resumed} of {total} lines: continuing from there")
        waiting: dict[int, Line] = {}
        try:
            with BatchReport(True if sys.stderr.isatty() else _PlainLines().show, total) as report:
                answers = self._target.answers(self._requests(waiting, report.ended))
                # Closing it, also after an error, ends the requests in the engine.
                with contextlib.closing(answers):  # type: ignore[type-var]
                    for index, answer in answers:
                        line = waiting.pop(index)
                        self._journal.add(line, self._record(answer))
                        failed = isinstance(answer, Exception)
                        report.ended(0 if isinstance(answer, Exception) else answer.tokens, failed=failed)
        except BaseException:
            complain(f"{len(self._journal)} of {total} lines are done; the same command continues from there")
            self._journal.close()
            raise
        return self._finish()

    def _requests(self, waiting: dict[int, Line], ended: Any) -> Iterator[tuple[AskedPrompt, Mapping[str, Any]]]:
        """Yield the prompts and options of the lines to answer, and note the line of each in `waiting` by its index."""
        index = 0
        for line in self._lines:
            if self._journal.has(line):
                ended(0, failed=False)
                continue
            if line.problem is not None:
                self._journal.add(line, {"input": line.text, "error": line.problem})
                ended(0, failed=True)
                continue
            try:
                prompt = self._prompter.of_line(line.text) if self._prompter else AskedPrompt(line.text)
            except PenstockError as error:
                self._journal.add(line, {"input": line.text, "error": error.message})
                ended(0, failed=True)
                continue
            waiting[index] = line
            index += 1
            yield prompt, self._options_of(line)

    def _options_of(self, line: Line) -> dict[str, Any]:
        """Return the options of a line. Its seed depends on its number alone, whatever ran before it."""
        if self._seed is None or not self._options.get("do_sample"):
            return self._options
        digest = hashlib.blake2b(f"{self._seed} {line.number}".encode(), digest_size=8).digest()
        return {**self._options, "seed": int.from_bytes(digest) % _SEEDS}

    def _record(self, answer: Answer | Exception) -> dict[str, Any]:
        """Return the record of an answer. Raises the error of an engine that cannot continue."""
        if isinstance(answer, Exception):
            if not isinstance(answer, _OF_THE_LINE):
                raise answer
            if not self._has_answer:
                _check_line_alone(answer)
            return {"error": answer.message if isinstance(answer, PenstockError) else str(answer)}
        self._has_answer = True
        texts = [text.strip() for text in answer.texts] if self._prompter else answer.texts
        record: dict[str, Any] = {"output": texts[0] if len(texts) == 1 else texts}
        return {**record, "reasoning": answer.reasoning} if answer.reasoning else record

    def _finish(self) -> int:
        """Write the predictions and the configuration, and report. Returns the exit code."""
        bad: list[tuple[int, str]] = []
        write_whole(self._path, json_list(self._entries(bad)))
        config = generation_config(self._options)
        if self._seed is not None:
            config["seed"] = self._seed
        write_whole(self._path.with_name("generation_config.json"), [_indented(config)])
        self._journal.remove()
        total = self._lines.total
        say(f"{total - len(bad)} of {total} lines are answered: {self._path}")
        for number, why in bad[:_MOST_NAMED]:
            complain(f"line {number}: {why}")
        if len(bad) > _MOST_NAMED:
            complain(f"and {len(bad) - _MOST_NAMED} more; each has its Error in the file")
        return SOME_FAILED if bad else 0

    def _entries(self, bad: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        """Yield the entries of the predictions in the order of the lines; note those with an error in `bad`."""
        shows = self._config.show or self._config.data_file is None
        for line in self._lines:
            record = self._journal.get(line)
            if record is None:
                raise StartupError("--data-file changed while it was read: run again", flag="--data-file")
            entry = {"Input": self._input(line), "Output": record.get("output", "")}
            if "reasoning" in record:
                entry["Reasoning"] = record["reasoning"]
            if "error" in record:
                entry["Error"] = record["error"]
                bad.append((line.number, record["error"]))
            if shows:
                say(f"======={line.number - 1}=======\nInput: {line.text}\n\nOutput: {entry['Output']}\n")
            yield entry

    def _input(self, line: Line) -> str:
        """Return the model's input text; the line itself if it is bad, or if the endpoint writes the template."""
        if self._prompter is None or line.problem is not None:
            return line.text
        return self._prompter.text_of(line.text) or line.text


def _check_line_alone(error: Exception) -> None:
    """Raise an error that every line would have, such as a refused option, so that the run ends at once."""
    if isinstance(error, PenstockError) and error.reason == "TEMPLATE_REFUSED":
        advice = "if it has no place for a system prompt, give --system-prompt '' or --prompt-template none"
        raise StartupError(f"{error.message}: {advice}", flag="--system-prompt") from error
    if isinstance(error, FailedPrecondition | NotFound):
        raise error
    if isinstance(error, InvalidArgument) and (error.field or "").startswith(_COMMON_FIELDS):
        raise error


class _PlainLines:
    """Progress without a terminal: an occasional line."""

    def __init__(self) -> None:
        self._began = self._shown = time.monotonic()

    def show(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS:
            self._shown = now
            failed = f", {progress.failed} failed" if progress.failed else ""
            rate = progress.tokens / (now - self._began)
            complain(f"{progress.done} of {progress.total} lines{failed}, {rate:.0f} tokens/s")


def _plain(value: Any) -> Any:
    """Return a value in JSON's types."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _indented(config: Mapping[str, Any]) -> str:
    return json.dumps(_plain(config), ensure_ascii=False, indent=2) + "\n"
