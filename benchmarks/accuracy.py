"""Accuracy of every number format against float32, on the same model and text.

    python -m benchmarks accuracy [--tokens 8192] [--json FILE]
    python -m benchmarks accuracy --model DIR --text FILE --tokens 1024

Formats are all combinations of `--dtype`, `--quantization` and `--kv-cache-dtype`. For each, under teacher forcing over
documents of `--context` tokens: perplexity, the largest and the mean absolute error of a logit (beside the spread of
the float32 logits), the share of positions with float32's likeliest token. And the mean length to which greedy
continuations are float32's, of at most `--new-tokens` tokens, beside their mean length in float32.

The embedded model reads conversations that training never saw: the held-out side of dev/demo/corpus, by a fixed seed.
It has learnt to answer and not to ask, so perplexity and `of answers` count the answers' tokens only, and continuations
begin from held-out prompts. Other models need `--text`: there everything counts, and continuations begin from the first
`--prompt` tokens of each document. float32's logits are kept: tokens x vocabulary x 4 bytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from penstock.common.checkpoint import resolve_model
from penstock.evaluation.number_format import NumberFormat
from penstock.evaluation.stepped_model import SteppedModel
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.models.registry import read_model_config
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks._arguments import be_quiet, refuse
from benchmarks._report import Report, Table

DTYPES, QUANTIZATIONS, KV_CACHE_DTYPES = ("float32", "bfloat16"), ("none", "int8", "int4"), ("auto", "int8")


FORMATS = [NumberFormat(*values) for values in itertools.product(DTYPES, QUANTIZATIONS, KV_CACHE_DTYPES)]
COLUMNS = (
    "dtype", "quantization", "KV", "perplexity", "logit error, mean", "largest", "same argmax", "of answers",
    "equal tokens of a continuation", "equal continuations", "weights MiB", "KV bytes a token",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Material:
    """Documents with, for each token, whether it counts as an answer, and what is continued until one of `ends`."""

    documents: list[list[int]]
    counted: list[list[bool]]
    prompts: list[list[int]]
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one format: per document (T - 1, vocabulary) logits of the next token, and continuations."""

    logits: list[Tensor]
    continuations: list[list[int]]
    weight_bytes: int
    kv_bytes_per_token: float


def held_out(folder: Path, options: argparse.Namespace) -> Material:
    """Conversations of the demo corpus's held-out side, several to a document, and held-out prompts."""
    from dev.demo.corpus import FAMILIES, held_out_prompts
    from dev.demo.model.evaluate import prompt_ids
    from dev.demo.model.render import Conversation, encode_conversations

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    rng = random.Random(options.seed)
    ids: list[int] = []
    counted: list[bool] = []
    while len(ids) < options.tokens:
        dialogue = FAMILIES[rng.choice(list(FAMILIES))](rng, True)
        conversation = Conversation("", tuple(dialogue.turns), tuple(dialogue.tools), False)
        row = encode_conversations([conversation], tokenizer, template)[0]
        ids, counted = ids + row.ids, counted + row.learn
    prompts = [prompt_ids(prompt, tokenizer, template) for prompt in held_out_prompts(options.per_family, options.seed)]
    context, ends = options.context, frozenset(read_model_config(folder).eos_token_ids)
    return Material(cut(ids, context, options.tokens), cut(counted, context, options.tokens), prompts, ends)


def of_text(folder: Path, options: argparse.Namespace) -> Material:
    """The beginning of a file, in the model's own tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = cut(tokenizer.encode(options.text.read_text(encoding="utf-8")).ids, options.context, options.tokens)
    prompts = [document[: options.prompt] for document in documents]
    counted = [[True] * len(document) for document in documents]
    return Material(documents, counted, prompts, frozenset(read_model_config(folder).eos_token_ids))


def cut(items: list[Any], context: int, tokens: int) -> list[list[Any]]:
    """Pieces of `context` each, about `tokens` items of them. Raises SystemExit when there is not one."""
    wanted = max(1, tokens // context)
    pieces = [items[start : start + context] for start in range(0, len(items) - context + 1, context)][:wanted]
    if not pieces:
        raise SystemExit(f"the text has {len(items)} tokens: fewer than --context {context}")
    return pieces


def run(
    folder: Path, device: CPUDevice, format: NumberFormat, material: Material, options: argparse.Namespace
) -> Found:
    """Read the documents in chunks, then continue all prompts together."""
    longest = max(options.context, max(map(len, material.prompts)) + options.new_tokens)
    model = SteppedModel(folder, device, format, len(material.prompts), longest)
    logits = []
    for document in material.documents:
        starts = range(0, len(document), options.chunk)
        chunks = [model.step([document[start : start + options.chunk]], [start]) for start in starts]
        logits.append(torch.cat(chunks)[:-1])
    continuations = [until(ids, material.ends) for ids in greedy(model, material.prompts, options.new_tokens)]
    return Found(logits, continuations, model.weights.num_bytes, model.kv_bytes_per_token)


def greedy(model: SteppedModel, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The likeliest token, again and again; nothing ends a continuation."""
    lengths = [len(prompt) for prompt in prompts]
    last = torch.tensor(lengths).cumsum(0) - 1
    newest = model.step(prompts, [0] * len(prompts))[last].argmax(-1)
    steps = [newest]
    for more in range(new_tokens - 1):
        newest = model.step([[int(token)] for token in newest], [length + more for length in lengths]).argmax(-1)
        steps.append(newest)
    return torch.stack(steps, 1).tolist()


def until(ids: list[int], ends: frozenset[int]) -> list[int]:
    """Up to the first end, which belongs to it."""
    return ids[: next((at for at, token in enumerate(ids) if token in ends), len(ids)) + 1]


def compare(found: Found, exact: Found, material: Material) -> dict[str, float]:
    """One row of the table."""
    losses, errors, largest, agreed, counted = [], [], 0.0, [], []
    for ours, theirs, ids, counts in zip(found.logits, exact.logits, material.documents, material.counted, strict=True):
        losses.append(F.cross_entropy(ours, torch.tensor(ids[1:]), reduction="none"))
        error = (ours - theirs).abs()
        largest = max(largest, float(error.max()))
        errors.append(error.mean(-1))
        agreed.append((ours.argmax(-1) == theirs.argmax(-1)).float())
        counted.append(torch.tensor(counts[1:]))
    answers, agree = torch.cat(counted), torch.cat(agreed)
    equal = [prefix(*pair) for pair in zip(found.continuations, exact.continuations, strict=True)]
    return {
        "perplexity": float(torch.cat(losses)[answers].mean().exp()),
        "mean_logit_error": float(torch.cat(errors).mean()),
        "max_logit_error": largest,
        "argmax_agreement": float(agree.mean()),
        "argmax_agreement_of_answers": float(agree[answers].mean()),
        "equal_prefix": sum(equal) / len(equal),
        "equal_continuations": sum(a == b for a, b in zip(found.continuations, exact.continuations, strict=True)),
        "weight_bytes": found.weight_bytes,
        "kv_bytes_per_token": found.kv_bytes_per_token,
    }


def prefix(ours: list[int], theirs: list[int]) -> int:
    """Tokens up to the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


@torch.inference_mode()
def measure(options: argparse.Namespace, table: Table) -> dict[str, Any]:
    """Every format, one after another."""
    device = CPUDevice()
    device.start(num_threads=options.threads, kernels=options.kernels)
    folder = resolve_model(options.model)
    material = held_out(folder, options) if options.text is None else of_text(folder, options)
    exact: Found | None = None
    rows: list[dict[str, Any]] = []
    for format in FORMATS:
        found = run(folder, device, format, material, options)
        exact = exact or found
        rows.append({**asdict(format), **compare(found, exact, material)})
        table.line(line(rows[-1], len(material.prompts)))
        del found
        gc.collect()
    assert exact is not None
    spread = float(torch.cat([logits.std(-1) for logits in exact.logits]).mean())
    return {
        "model": options.model or "the embedded one",
        "device": device.describe(),
        "torch": torch.__version__,
        "positions": sum(len(document) - 1 for document in material.documents),
        "answer_positions": sum(sum(counts[1:]) for counts in material.counted),
        "documents": len(material.documents),
        "continuations": len(material.prompts),
        "continuation_length": sum(map(len, exact.continuations)) / len(exact.continuations),
        "logit_spread": spread,
        "formats": rows,
    }


def line(row: dict[str, Any], continuations: int) -> str:
    """Return a line of the table."""
    return (
        f"| {row['dtype']} | {row['quantization']} | {row['kv_cache_dtype']} | {row['perplexity']:.4f} "
        f"| {row['mean_logit_error']:.4f} | {row['max_logit_error']:.2f} | {row['argmax_agreement']:.2%} "
        f"| {row['argmax_agreement_of_answers']:.2%} | {row['equal_prefix']:.1f} "
        f"| {row['equal_continuations']} of {continuations} | {row['weight_bytes'] / 2**20:.1f} "
        f"| {row['kv_bytes_per_token']:.0f} |"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--model", help="a folder; the embedded model when left out")
    parser.add_argument("--text", type=Path, help="UTF-8 text that is read; by default the demo model's held-out side")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text (default: %(default)s)")
    parser.add_argument("--context", type=int, default=512, help="tokens of a document (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of one step (default: %(default)s)")
    parser.add_argument(
        "--prompt", type=int, default=64, help="tokens of the text that are continued (default: %(default)s)"
    )
    parser.add_argument("--per-family", type=int, default=8, help="held-out prompts of each kind that are continued")
    parser.add_argument("--new-tokens", type=int, default=96, help="of a continuation (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")
    parser.add_argument("--seed", type=int, default=20261121, help="of the held-out text")


def main(options: argparse.Namespace, report: Report) -> None:
    """Measure, and report it."""
    if options.model is not None and options.text is None:
        refuse("--model needs --text: only the embedded model has held-out text of its own")
    if options.prompt >= options.context:
        refuse("--prompt must be shorter than --context")
    be_quiet(options.threads)
    table = report.table(COLUMNS)
    results = measure(options, table)
    print(f"\n{results['positions']} positions, {results['answer_positions']} of answers; float32's logits spread by")
    print(f"{results['logit_spread']:.2f}, its continuations are {results['continuation_length']:.1f} tokens long")
    report.save(results)
