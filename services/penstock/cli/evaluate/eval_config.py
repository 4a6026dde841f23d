"""Options of `penstock eval`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.options import option, options_of
from penstock.generation.config import GenerationServiceConfig

MEASURED, REFERENCE, TEXT, REPORT = "What is measured", "Reference", "Text", "Report"
TRANSFORMERS = "transformers"
SAVED = ".safetensors"
# As the server's own bound on prompt_logprobs.
_SERVED_TOP = 20
_SERVICE = {field.name: field for field in dataclasses.fields(GenerationServiceConfig)}


def _as_served(name: str) -> Any:
    """Return the field of the generation service's option `name`."""
    return dataclasses.field(default=_SERVICE[name].default, metadata=_SERVICE[name].metadata)


def checked_format(text: str) -> str:
    """Return `text` when it names a number format. Raises ValueError."""
    from penstock.evaluation.number_format import NumberFormat

    NumberFormat.parse(text)
    return text


def _formats(text: str) -> tuple[str, ...]:
    return tuple(checked_format(one.strip()) for one in text.split(",") if one.strip())


def _reference(text: str) -> str:
    return text if text == TRANSFORMERS or text.endswith(SAVED) else checked_format(text)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Configuration of `penstock eval`, except the connection: what reads the text, beside which reference."""

    model: str | None = option(None, "Folder, GGUF file or hub id; the embedded model when left out.", group=MEASURED)
    format: tuple[str, ...] = option(
        ("auto",),
        "Number formats to measure, with commas: words of --dtype, --quantization and, after kv-, "
        "--kv-cache-dtype with + between, such as bfloat16,int8,bfloat16+int4+kv-int8. auto: as `penstock serve` does.",
        group=MEASURED,
        metavar="FORMAT,…",
        parse=_formats,
    )
    endpoint: str | None = option(
        None,
        "host:port of a router, such as that of `penstock serve`: its model is measured, and MODEL is that of the "
        "reference and of the tokenizer.",
        group=MEASURED,
        metavar="HOST:PORT",
    )
    threads: int | None = _as_served("threads")
    kernels: str = _as_served("kernels")
    compact_weights: str = _as_served("compact_weights")

    reference: str = option(
        TRANSFORMERS,
        "transformers: its own modules in float32; a number format, as --format has them; or a file of "
        "--save-reference, which has its text with it.",
        group=REFERENCE,
        metavar="transformers|FORMAT|FILE.safetensors",
        parse=_reference,
    )
    reference_model: str | None = option(
        None,
        "Model of the reference, with the same tokens: the checkpoint from which a quantised MODEL was made.",
        group=REFERENCE,
        metavar="MODEL",
    )
    save_reference: str | None = option(
        None, "Write the reference's reading to this file, for --reference.", group=REFERENCE, metavar="FILE"
    )

    text_file: str | None = option(None, "Text that is read, UTF-8.", group=TEXT, metavar="FILE")
    tokens: int = option(9216, "Tokens of the text.", group=TEXT, minimum=2, maximum=1_000_000)
    context: int = option(512, "Tokens of a document: each is read by itself.", group=TEXT, minimum=2, maximum=131_072)
    chunk: int = option(128, "Tokens of one step.", group=TEXT, minimum=1, maximum=65_536)
    top: int = option(
        256,
        "Likeliest tokens that are kept of each place, for the divergence: each counts by itself, the rest together. "
        f"A server gives {_SERVED_TOP} at most.",
        group=TEXT,
        minimum=1,
        maximum=1_000_000,
    )
    max_text_bytes: int = option(64 << 20, "Largest text file.", group=TEXT, minimum=1)
    max_reading_bytes: int = option(
        2 << 30, "Most memory of one reading: --tokens times --top times 8 bytes.", group=TEXT, minimum=1
    )

    json: str | None = option(
        None, "Write the figures to this file as JSON; - is standard output.", group=REPORT, metavar="FILE"
    )
    plot: str | None = option(
        None, "Draw the formats' error into this file: PNG, SVG or PDF by its suffix.", group=REPORT, metavar="FILE"
    )
    quiet: bool = option(False, "Show no progress.", group=REPORT)

    def __post_init__(self) -> None:
        from penstock.common.errors import StartupError  # imports grpc, which --help must not wait for

        saved = self.reference.endswith(SAVED)
        if saved and self.text_file:
            raise StartupError(
                f"--reference {self.reference} has its own text: leave --text-file out", flag="--text-file"
            )
        if saved and (self.save_reference or self.reference_model):
            flag = "--save-reference" if self.save_reference else "--reference-model"
            raise StartupError(f"--reference {self.reference} is read already: leave {flag} out", flag=flag)
        if not saved and not self.text_file:
            raise StartupError("--text-file is missing: the text that both read", flag="--text-file")
        if self.save_reference and Path(self.save_reference).suffix != SAVED:
            raise StartupError(
                f"--save-reference {self.save_reference}: expected a name ending in {SAVED}", flag="--save-reference"
            )
        if not self.format:
            raise StartupError("--format is empty", flag="--format")
        if self.endpoint and self.format != ("auto",):
            raise StartupError("--format is for a model that is loaded here: leave --endpoint out", flag="--format")

    @property
    def most_likeliest(self) -> int:
        """Number of likeliest tokens to ask of the reading that is measured."""
        return min(self.top, _SERVED_TOP) if self.endpoint else self.top


OPTIONS = options_of(EvalConfig)
