"""GGUF files of every kept type beside llama.cpp on the same file: the distance of both from float32.

    python -m benchmarks gguf_beside [--models smollm2-135m] [--types published q8_0 q6_k …] [--json FILE]

Both real models (real_models.py): the file as it was published, and files that llama.cpp's own quantizer makes of the
weights with channels in another order. Both engines read the same tokens of English prose. A first pair of figures is
the mean magnitude of the difference of a log-probability from transformers in float32 on the numbers that the file
means: what an engine's own arithmetic costs. The second is that from the model before it was quantised. Where a
matrix's width does not divide into blocks of a type llama.cpp takes another; the types are counted beside. llama.cpp
comes with `make peers`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.common.checkpoint import resolve_model
from penstock.evaluation.number_format import NumberFormat
from penstock.evaluation.readers import FormatReader, Reader, TransformersReader, read_all
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.weights.quantised.gguf import GgufCheckpoint
from safetensors.torch import save_file

from benchmarks._arguments import at_least, be_quiet
from benchmarks._report import Report
from benchmarks._text_error import CONTEXT, TextError, prose_documents
from benchmarks.checkpoints import CACHE
from benchmarks.engines import ENGINES
from benchmarks.engines.base import Settings, TextScores
from benchmarks.engines.gguf_files import PUBLISHED, QUANTIZED, gguf_file_of
from benchmarks.engines.process import EngineProcess
from benchmarks.real_models import MODELS, bf16_folder, gguf_file
from benchmarks.roofline import Model

LLAMACPP = "llamacpp"
# Penstock's numbers around the products, by the words of a column. llama.cpp's are float32.
OURS = {"Penstock": "bfloat16", "Penstock, float32": "float32"}
READERS = (*OURS, "llama.cpp")
COLUMNS = (
    "model",
    "file",
    "matrices",
    "bits a weight",
    *READERS,
    *(f"{reader}, from the model" for reader in READERS),
)


def types_of(file: Path) -> str:
    """Return the types of a file's matrices with their numbers, the most frequent first."""
    import gguf

    found = Counter(one.tensor_type.name for one in gguf.GGUFReader(file).tensors if len(one.shape) > 1)
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


def scores_of(reader: Reader, documents: list[list[int]]) -> TextScores:
    """Return a reader's readings."""
    found = read_all(reader, documents, 1, lambda _done, _total: None)
    return TextScores(found.log_probability.tolist(), found.likeliest_ids[:, 0].tolist())


def read_by_llamacpp(settings: Settings, documents: list[list[int]]) -> TextScores:
    """Return llama.cpp's readings. Raises EngineFailed."""
    process = EngineProcess(LLAMACPP, ENGINES[LLAMACPP], Path(settings.cache), settings.threads, passive=True)
    try:
        process.load(settings)
        scores = process.score(documents)
        process.close()
    finally:
        process.stop()
    return scores


def read_exactly(checkpoint: Path, config: Path, documents: list[list[int]]) -> TextScores:
    """Return transformers' readings in float32 of the numbers that a file means. `checkpoint`: the folder that the
    service makes of the file; `config`: that of the same model with its configuration."""
    source = GgufCheckpoint(checkpoint)
    with tempfile.TemporaryDirectory(dir=config.parent) as scratch:
        shutil.copy(config / "config.json", scratch)
        tensors = {name: source.take(name).float().contiguous() for name in source.names()}
        save_file(tensors, Path(scratch) / "model.safetensors", metadata={"format": "pt"})
        del tensors
        return scores_of(TransformersReader(Path(scratch)), documents)


class Beside:
    """All readers on one file after the other."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = CPUDevice()
        self._device.start(num_threads=options.threads, kernels=options.kernels)
        # Of the models before they were quantised, by their folders.
        self._exact: dict[Path, TextScores] = {}

    def row(self, name: str, kind: str) -> dict[str, Any]:
        """Return the errors of all readers on a file, from its own numbers and from the model."""
        cache = self._options.cache
        folder = bf16_folder(name, cache, permuted=kind != PUBLISHED)
        documents = prose_documents(folder, self._options.tokens)
        published = str(gguf_file(name, cache))
        settings = Settings(str(folder), kind, self._options.threads, CONTEXT, CONTEXT, str(cache), published=published)
        file = gguf_file_of(settings)
        checkpoint = Path(resolve_model(str(file)))
        if folder not in self._exact:
            self._exact[folder] = scores_of(TransformersReader(folder), documents)
        own = read_exactly(checkpoint, folder, documents)
        found = {title: self._ours(checkpoint, dtype, documents) for title, dtype in OURS.items()}
        found["llama.cpp"] = read_by_llamacpp(settings, documents)
        return {
            "model": name,
            "file": kind,
            "types": types_of(file),
            "bits": 8.0 * file.stat().st_size / Model.read(folder).parameters,
            "from_the_file": {title: TextError.between(one, own).facts() for title, one in found.items()},
            "from_the_model": {
                title: TextError.between(one, self._exact[folder]).facts() for title, one in found.items()
            },
        }

    def _ours(self, checkpoint: Path, dtype: str, documents: list[list[int]]) -> TextScores:
        longest = max(map(len, documents))
        return scores_of(FormatReader(checkpoint, self._device, NumberFormat(dtype), longest, longest), documents)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    errors = [*row["from_the_file"].values(), *row["from_the_model"].values()]
    shown = (f"{one['error']:.4f}, {one['agreement']:.1%}" for one in errors)
    return [row["model"], row["file"], row["types"], f"{row['bits']:.2f}", *shown]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    types = (PUBLISHED, *QUANTIZED)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--types", nargs="+", default=list(types), choices=types, metavar="TYPE", help=", ".join(types))
    parser.add_argument("--cache", type=Path, default=CACHE, help="of models and engines (default: %(default)s)")
    parser.add_argument("--tokens", type=at_least(2), default=2048, help="of the text (default: %(default)s)")
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    # Where the service puts what it makes of a GGUF file.
    os.environ["XDG_CACHE_HOME"] = str(options.cache.parent)
    table, beside, rows = report.table(COLUMNS), Beside(options), []
    for name in options.models:
        for kind in options.types:
            rows.append(beside.row(name, kind))
            table.row(*cells(rows[-1]))
            # Each takes minutes: a run that is stopped leaves what it has.
            report.save_so_far({**report.settings, "rows": rows})
    report.save({**report.settings, "rows": rows})
