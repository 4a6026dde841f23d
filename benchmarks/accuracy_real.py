"""Accuracy of every number format on real weights: both models of real_models.py, English prose, beside transformers.

    python -m benchmarks accuracy_real [--models smollm2-135m gemma3-270m] [--formats bf16 int8 int4 …] [--json FILE]

Documents of `--context` tokens of data/prose.txt are read under teacher forcing by transformers in float32, and by each
format. Of every next token that the text has: the mean magnitude of the difference of its log-probabilities, how often
both find the same token the likeliest, and the format's perplexity over float32's. Formats of 4 bits are measured on
weights whose channels have another order (real_models.py says why), against transformers on the same weights; `gguf` is
the published file as it is.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from penstock.common.checkpoint import resolve_model
from penstock.generation.devices.cpu import CPUDevice
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks._arguments import be_quiet
from benchmarks._report import Report, Table
from benchmarks.accuracy import Format, Model
from benchmarks.checkpoints import CACHE
from benchmarks.real_models import MODELS, bf16_folder, gguf_file

PROSE = Path(__file__).with_name("data") / "prose.txt"
# By the flags of the generation service.
FORMATS = {
    "float32": Format("float32", "none", "auto"),
    "bf16": Format("bfloat16", "none", "auto"),
    "bf16, KV int8": Format("bfloat16", "none", "int8"),
    "int8": Format("bfloat16", "int8", "auto"),
    "float32, int8": Format("float32", "int8", "auto"),
    "int8, KV int8": Format("bfloat16", "int8", "int8"),
    "int4": Format("bfloat16", "int4", "auto"),
    "float32, int4": Format("float32", "int4", "auto"),
    "gguf": Format("bfloat16", "auto", "auto"),
}
COLUMNS = (
    "model",
    "format",
    "mean difference of a log-probability",
    "same likeliest token",
    "perplexity, of float32's",
)


@dataclass(frozen=True, slots=True)
class Read:
    """A model's reading of the documents: each next token's log-probability, and the likeliest token there."""

    log_probability: Tensor
    likeliest: Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """The cost of a format."""

    mean: float
    agreement: float
    perplexity_ratio: float

    @classmethod
    def between(cls, found: Read, exact: Read) -> Difference:
        """Compare a format with float32."""
        difference = found.log_probability - exact.log_probability
        return cls(
            float(difference.abs().mean()),
            float((found.likeliest == exact.likeliest).float().mean()),
            float((-difference.mean()).exp()),
        )


def documents(folder: Path, tokens: int, context: int) -> list[list[int]]:
    """Return the text's first tokens in documents, each with the token that begins a text, where the tokenizer adds
    one."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.encode("").ids
    ids = tokenizer.encode(PROSE.read_text(encoding="utf-8"), add_special_tokens=False).ids[:tokens]
    step = context - len(first)
    return [first + ids[at : at + step] for at in range(0, len(ids), step)]


def of_logits(pieces: list[Tensor], ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and likeliest tokens of (rows, vocabulary) in pieces: the last row has no next token."""
    following, at = torch.tensor(ids[1:]), 0
    found, likeliest = [], []
    for piece in pieces:
        rows = min(len(piece), len(following) - at)
        scores = piece[:rows].float().log_softmax(-1)
        found.append(scores.gather(1, following[at : at + rows, None]).squeeze(1))
        likeliest.append(scores.argmax(-1))
        at += rows
    return torch.cat(found), torch.cat(likeliest)


def read_exact(folder: Path, rows: list[list[int]], chunk: int) -> Read:
    """Read by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in rows:
        states = model.model(torch.tensor([ids]), use_cache=False)[0][0]
        found.append(of_logits([model.lm_head(states[at : at + chunk]) for at in range(0, len(ids), chunk)], ids))
    return Read(torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found]))


def read_ours(folder: Path, device: CPUDevice, format: Format, rows: list[list[int]], chunk: int) -> Read:
    """Read by the generation service's model."""
    model = Model(folder, device, format, 1, max(map(len, rows)))
    found = []
    for ids in rows:
        pieces = [of for at in range(0, len(ids), chunk) for of in [model.step([ids[at : at + chunk]], [at])]]
        found.append(of_logits(pieces, ids))
    return Read(torch.cat([one[0] for one in found]), torch.cat([one[1] for one in found]))


@torch.inference_mode()
def measure(options: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """Return a row for each model and format, printed as they come."""
    device = CPUDevice()
    device.start(num_threads=options.threads, kernels=options.kernels)
    result = []
    for name in options.models:
        exact: dict[Path, Read] = {}
        for label in options.formats:
            format = FORMATS[label]
            reference = bf16_folder(name, options.cache, permuted=format.quantization == "int4")
            is_file = format.quantization == "auto"
            folder = Path(resolve_model(str(gguf_file(name, options.cache)))) if is_file else reference
            rows = documents(reference, options.tokens, options.context)
            if reference not in exact:
                exact[reference] = read_exact(reference, rows, options.chunk)
            found = read_ours(folder, device, format, rows, options.chunk)
            difference = Difference.between(found, exact[reference])
            result.append({"model": name, "format": label, **asdict(format), **asdict(difference)})
            cells = (f"{difference.mean:.4f}", f"{difference.agreement:.2%}", f"{difference.perplexity_ratio:.4f}")
            table.row(name, label, *cells)
            gc.collect()
    return result


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--cache", type=Path, default=CACHE, help="of the models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=9216, help="of the text (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one step (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    be_quiet(options.threads)
    rows = measure(options, report.table(COLUMNS))
    report.save({**report.settings, "rows": rows})
