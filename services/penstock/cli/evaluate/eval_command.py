"""Command `penstock eval`: how near number formats, or a running server, are to a reference on a text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock import __version__
from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.console import complain, console
from penstock.cli.evaluate.eval_config import OPTIONS, SAVED, TRANSFORMERS, EvalConfig
from penstock.cli.evaluate.picture import check_picture, draw_errors
from penstock.cli.flags import ENV_NOTE, Overrides, command
from penstock.cli.progress_display import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common.checkpoint import model_name, resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.logging import configure_logging
from penstock.common.options import options_of

if TYPE_CHECKING:
    from penstock.evaluation.readers import FormatReader, Reader
    from penstock.evaluation.reading import Reading
    from penstock.generation.devices.base import Device

EPILOG = f"""Each document of the text is read with its own tokens given (teacher forcing), by the
reference and by each format. Figures are means over the text's tokens: the magnitude of
the difference of a token's log-probability, the share of the same likeliest token, the
Kullback-Leibler divergence in nats, the perplexity over the reference's.
docs/guide/accuracy.md explains them. Models that are loaded here run on the CPU; for
other devices, serve the model and give --endpoint.

{ENV_NOTE}

Examples:

  penstock eval ./my-model --text-file book.txt --format bfloat16,int8,int4

  penstock eval ./my-model-awq --reference-model ./my-model --text-file book.txt

  penstock eval ./my-model --text-file book.txt --save-reference exact.safetensors --json figures.json

  penstock eval --reference exact.safetensors --endpoint 127.0.0.1:50050

  penstock eval ./my-model --text-file book.txt --format bfloat16,int8 --plot formats.svg"""

_COLUMNS = ("format", "|Δ log-probability|", "same likeliest token", "divergence", "perplexity", "of the reference's")
_PROGRESS_SECONDS = 1.0


class ReadingLine:
    """Progress on standard error: one line that is overwritten on a terminal, otherwise an occasional line."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._terminal = quiet, sys.stderr.isatty()
        self._label, self._began, self._next = "", 0.0, 0.0

    def begin(self, label: str) -> None:
        """Begin the line of one reader."""
        self._label, self._began = label, time.perf_counter()
        self._next = self._began + (0 if self._terminal else 10 * _PROGRESS_SECONDS)

    def __call__(self, done: int, total: int) -> None:
        """Show how many of the documents are read."""
        now = time.perf_counter()
        if self._quiet or now < self._next:
            return
        self._next = now + (_PROGRESS_SECONDS if self._terminal else 10 * _PROGRESS_SECONDS)
        line = f"{self._label}: {done} of {total} documents, {now - self._began:.0f} s"
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"penstock: {line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._terminal and not self._quiet:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@dataclass(slots=True)
class Evaluation:
    """One run of the command: its reference's reading, and the documents."""

    config: EvalConfig
    line: ReadingLine
    # MODEL's folder; None: a saved reference and a server need none.
    folder: Path | None
    _device: Device | None = None

    def run(self, connection: ConnectionConfig | None) -> dict[str, Any]:
        """Return the report. Raises StartupError and PenstockError."""
        documents, exact, about = self._reference()
        rows = self._served(connection, documents, exact) if connection else self._formats(documents, exact)
        return {
            "model": model_name(self.config.model),
            "reference": about,
            "documents": len(documents),
            "tokens": sum(map(len, documents)) - len(documents),
            "reference_perplexity": exact.perplexity,
            "rows": rows,
        }

    def _reference(self) -> tuple[list[list[int]], Reading, str]:
        """Return the documents, the reference's reading of them, and the reference in words."""
        from penstock.evaluation.reading import SavedReading

        config = self.config
        if config.reference.endswith(SAVED):
            saved = SavedReading.load(Path(config.reference).expanduser())
            return saved.documents, saved.reading, saved.about
        folder = self._resolved(config.reference_model or config.model)
        documents = self._documents(folder)
        about = f"{model_name(config.reference_model or config.model)}, {config.reference}"
        reader = self._reference_reader(folder, max(map(len, documents)))
        exact = self._read(f"reference ({config.reference})", reader, documents, config.top)
        if config.save_reference:
            try:
                exact.save(Path(config.save_reference).expanduser(), documents, about)
            except OSError as error:
                raise StartupError(
                    f"--save-reference {config.save_reference}: {error.strerror}", flag="--save-reference"
                ) from error
            complain(f"the reference's reading written to {config.save_reference}")
        return documents, exact, about

    def _documents(self, folder: Path) -> list[list[int]]:
        from penstock.evaluation.documents import documents_of

        config = self.config
        file = Path(str(config.text_file)).expanduser()
        try:
            size = file.stat().st_size
            if size > config.max_text_bytes:
                raise StartupError(
                    f"--text-file {config.text_file}: {size} bytes are more than --max-text-bytes "
                    f"{config.max_text_bytes}",
                    flag="--max-text-bytes",
                )
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise StartupError(f"--text-file {config.text_file}: {why}", flag="--text-file") from error
        return documents_of(folder, text, config.tokens, config.context)

    def _reference_reader(self, folder: Path, longest: int) -> Reader:
        if self.config.reference == TRANSFORMERS:
            from penstock.evaluation.readers import TransformersReader

            return TransformersReader(folder)
        return self._format_reader(folder, self.config.reference, "--reference", longest)

    def _format_reader(self, folder: Path, text: str, flag: str, longest: int) -> FormatReader:
        from penstock.evaluation.number_format import NumberFormat
        from penstock.evaluation.readers import FormatReader as Made

        if self._device is None:
            from penstock.generation.devices.cpu import CPUDevice

            self._device = CPUDevice()
            self._device.start(
                num_threads=self.config.threads,
                kernels=self.config.kernels,
                compact_weights=self.config.compact_weights,
            )
        try:
            return Made(folder, self._device, NumberFormat.parse(text), longest, self.config.chunk)
        except StartupError as error:
            if error.flag in ("--dtype", "--quantization", "--kv-cache-dtype"):
                raise StartupError(f"{flag} {text}: {error}", flag=flag) from error
            raise

    def _formats(self, documents: list[list[int]], exact: Reading) -> list[dict[str, Any]]:
        from penstock.evaluation.number_format import NumberFormat

        folder, rows = self._resolved(self.config.model), []
        for text in self.config.format:
            reader = self._format_reader(folder, text, "--format", max(map(len, documents)))
            facts = {**asdict(NumberFormat.parse(text)), "weight_bytes": reader.weight_bytes}
            facts["bits_per_weight"] = reader.bits_per_weight
            facts["kv_bytes_per_token"] = reader.kv_bytes_per_token
            rows.append(self._row(text, reader, documents, exact, facts))
            # The next format is loaded without this one in memory.
            del reader
        return rows

    def _served(self, connection: ConnectionConfig, documents: list[list[int]], exact: Reading) -> list[dict[str, Any]]:
        from penstock.cli.evaluate.served_reader import ServedReader

        with open_client(connection) as client:
            label = f"{connection.address}"
            return [self._row(label, ServedReader(client), documents, exact, {"endpoint": connection.address})]

    def _row(
        self, label: str, reader: Reader, documents: list[list[int]], exact: Reading, facts: dict[str, Any]
    ) -> dict[str, Any]:
        from penstock.evaluation.difference import Difference

        began = time.perf_counter()
        found = self._read(label, reader, documents, self.config.most_likeliest)
        seconds = time.perf_counter() - began
        if len(found.log_probability) != len(exact.log_probability):
            raise StartupError("--reference: it has another number of tokens", flag="--reference")
        difference = asdict(Difference.between(found, exact))
        return {"format": label, **facts, **difference, "perplexity": found.perplexity, "seconds": seconds}

    def _read(self, label: str, reader: Reader, documents: list[list[int]], most: int) -> Reading:
        from penstock.evaluation.readers import read_all

        self.line.begin(label)
        try:
            return read_all(reader, documents, most, self.line)
        finally:
            self.line.end()

    def _resolved(self, model: str | None) -> Path:
        if model == self.config.model and self.folder is not None:
            return self.folder
        with _display() as display:
            folder = resolve_model(model, show=display.show)
        if model == self.config.model:
            self.folder = folder
        return folder


@contextmanager
def _display() -> Iterator[ProgressDisplay]:
    display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
    try:
        yield display
    finally:
        display.close()


def run_eval(given: Overrides) -> None:
    """Read the text, and report the differences. Raises StartupError for a wrong flag, PenstockError."""
    dialled = {bound.name: given.pop(bound.name) for bound in _CONNECTION if bound.name in given}
    config = from_env_and_flags(EvalConfig, given)
    if dialled and not config.endpoint:
        flag = next(bound.flag for bound in _CONNECTION if bound.name in dialled)
        raise StartupError(f"{flag} is for an --endpoint: give one, or leave it out", flag=flag)
    if config.tokens * config.top * 8 > config.max_reading_bytes:
        raise StartupError(
            f"--tokens {config.tokens} times --top {config.top} are more than --max-reading-bytes: give a smaller one",
            flag="--top",
        )
    for flag, path in (("--json", config.json), ("--plot", config.plot), ("--save-reference", config.save_reference)):
        _check_folder(flag, path)
    if config.plot is not None:
        check_picture(config.plot)
    connection = None
    if config.endpoint:
        connection = from_env_and_flags(ConnectionConfig, {**dialled, "address": config.endpoint})
    _write(config, Evaluation(config, ReadingLine(config.quiet), None).run(connection))


def _check_folder(flag: str, path: str | None) -> None:
    """Check a file's folder before the work rather than after it. Raises StartupError."""
    if path is not None and path != "-" and not Path(path).expanduser().absolute().parent.is_dir():
        raise StartupError(f"{flag} {path}: there is no such folder", flag=flag)


def _write(config: EvalConfig, report: dict[str, Any]) -> None:
    if config.json != "-":
        console().print(_table(report))
    if config.plot is not None:
        title = f"{report['model']} beside {report['reference']}, {report['tokens']} tokens"
        draw_errors(report["rows"], title, config.plot)
        complain(f"picture written to {config.plot}")
    if config.json is None:
        return
    settings = asdict(config)
    text = json.dumps({"benchmark": "eval", "version": __version__, "settings": settings, **report}, indent=2) + "\n"
    if config.json == "-":
        sys.stdout.write(text)
        return
    try:
        Path(config.json).expanduser().write_text(text)
    except OSError as error:
        raise StartupError(f"--json {config.json}: {error.strerror}", flag="--json") from error
    complain(f"figures written to {config.json}")


def _table(report: dict[str, Any]) -> Any:
    from rich.table import Table

    title = f"{report['tokens']} tokens in {report['documents']} documents, beside {report['reference']} (perplexity "
    table = Table(*_COLUMNS, title=f"{title}{report['reference_perplexity']:.4g})", title_justify="left")
    for row in report["rows"]:
        table.add_row(
            row["format"],
            f"{row['mean']:.4f}",
            f"{row['agreement']:.2%}",
            f"{row['kl']:.5f}",
            f"{row['perplexity']:.4g}",
            f"{row['perplexity_ratio']:.4f}",
        )
    return table


def _eval(given: Overrides) -> None:
    # Standard output is for the result.
    configure_logging("eval", level="warning")
    run_eval(given)


_CONNECTION = [bound for bound in options_of(ConnectionConfig) if bound.name != "address"]
commands = typer.Typer(add_completion=False)
commands.command("eval", epilog=EPILOG)(command([*OPTIONS, *_CONNECTION], _eval))
