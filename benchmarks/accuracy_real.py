"""Accuracy of every number format on real weights: both models of real_models.py, English prose, beside transformers.

    python -m benchmarks accuracy_real [--models smollm2-135m gemma3-270m] [--formats bf16 int8 int4 …] [--json FILE]

Documents of `--context` tokens of data/prose.txt are read under teacher forcing by transformers in float32, and by each
format, as `penstock eval` reads (services/penstock/evaluation). Of every next token that the text has: the mean
magnitude of the difference of its log-probabilities, how often both find the same token the likeliest, the format's
perplexity over float32's, and the divergence. Formats of 4 bits are measured on
weights whose channels have another order (real_models.py says why), against transformers on the same weights; `gguf` is
the published file as it is.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.common.checkpoint import resolve_model
from penstock.evaluation.difference import Difference
from penstock.evaluation.documents import documents_of
from penstock.evaluation.number_format import NumberFormat
from penstock.evaluation.readers import FormatReader, TransformersReader, read_all
from penstock.evaluation.reading import Reading
from penstock.generation.devices.cpu import CPUDevice

from benchmarks._arguments import be_quiet, refuse
from benchmarks._report import Report, Table
from benchmarks.checkpoints import CACHE
from benchmarks.engines.compressed import quantised_folder
from benchmarks.real_models import MODELS, bf16_folder, gguf_file

PROSE = Path(__file__).with_name("data") / "prose.txt"
# By the flags of the generation service.
FORMATS = {
    "float32": NumberFormat("float32", "none", "auto"),
    "bf16": NumberFormat("bfloat16", "none", "auto"),
    "bf16, KV int8": NumberFormat("bfloat16", "none", "int8"),
    "int8": NumberFormat("bfloat16", "int8", "auto"),
    "float32, int8": NumberFormat("float32", "int8", "auto"),
    "int8-groups": NumberFormat("bfloat16", "int8-groups", "auto"),
    "int8, KV int8": NumberFormat("bfloat16", "int8", "int8"),
    "int4": NumberFormat("bfloat16", "int4", "auto"),
    "float32, int4": NumberFormat("float32", "int4", "auto"),
    "gguf": NumberFormat("bfloat16", "auto", "auto"),
}
# Folders of `penstock quantize`: size of groups, and --bits.
QUANTIZED: dict[str, tuple[int, float | None]] = {
    "quantize, groups of 32": (32, None),
    "quantize, groups of 64": (64, None),
    "quantize, 4.6 bits": (64, 4.6),
    "quantize, 5.5 bits": (64, 5.5),
}
FORMATS |= {label: NumberFormat("bfloat16", "auto", "auto") for label in QUANTIZED}
COLUMNS = (
    "model",
    "format",
    "mean difference of a log-probability",
    "same likeliest token",
    "perplexity, of float32's",
    "divergence, nats",
    "bits a weight",
)


def documents(folder: Path, tokens: int, context: int) -> list[list[int]]:
    """Return the prose in documents of at most `context` tokens."""
    return documents_of(folder, PROSE.read_text(encoding="utf-8"), tokens, context)


def show_nothing(_done: int, _total: int) -> None:
    """Drop the progress: a row is printed for each format."""


def measure(
    options: argparse.Namespace, table: Table, save: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Return a row for each model and format, printed as they come; `save` gets those so far."""
    device = CPUDevice()
    device.start(num_threads=options.threads, kernels=options.kernels)
    result = []
    for name in options.models:
        exact: dict[Path, Reading] = {}
        for label in options.formats:
            format = FORMATS[label]
            is_permuted = format.quantization == "int4" or label in QUANTIZED
            reference = bf16_folder(name, options.cache, permuted=is_permuted)
            folder = reference
            if label in QUANTIZED:
                group, most_bits = QUANTIZED[label]
                folder = quantised_folder(reference, group, options.cache, most_bits)
            elif format.quantization == "auto":
                folder = Path(resolve_model(str(gguf_file(name, options.cache))))
            rows = documents(reference, options.tokens, options.context)
            if reference not in exact:
                exact[reference] = read_all(TransformersReader(reference), rows, options.top, show_nothing)
            reader = FormatReader(folder, device, format, max(map(len, rows)), options.chunk)
            difference = Difference.between(read_all(reader, rows, options.top, show_nothing), exact[reference])
            facts = {
                "weight_bytes": reader.weight_bytes,
                "bits_per_weight": reader.bits_per_weight,
                "kv_bytes_per_token": reader.kv_bytes_per_token,
            }
            result.append({"model": name, "format": label, **asdict(format), **facts, **asdict(difference)})
            # The next format is loaded without this one in memory.
            del reader
            cells = (f"{difference.mean:.4f}", f"{difference.agreement:.2%}", f"{difference.perplexity_ratio:.4f}")
            table.row(name, label, *cells, f"{difference.kl:.5f}", f"{facts['bits_per_weight']:.2f}")
            # Each takes minutes: a run that is stopped leaves what it has.
            save(result)
    return result


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the error over the bits of a weight, a series for each model. Raises ImportError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == name and row["dtype"] == "bfloat16"]
        axes.plot([row["bits_per_weight"] for row in own], [row["mean"] for row in own], "o", label=name)
        for row in own:
            axes.annotate(row["format"], (row["bits_per_weight"], row["mean"]), fontsize=8)
    axes.set(
        xlabel="bits a weight, as loaded (log)", ylabel="mean |difference of a log-probability| (log)", xscale="log"
    )
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(path)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--cache", type=Path, default=CACHE, help="of the models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=9216, help="of the text (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one step (default: %(default)s)")
    parser.add_argument(
        "--top", type=int, default=256, help="likeliest tokens of the divergence (default: %(default)s)"
    )
    parser.add_argument("--plot", type=Path, help="draw error over bits a weight there (SVG, PNG; needs matplotlib)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib")
    table = report.table(COLUMNS)
    rows = measure(options, table, lambda rows: report.save_so_far({**report.settings, "rows": rows}))
    report.save({**report.settings, "rows": rows})
    if options.plot is not None:
        plot(rows, options.plot)
