"""Every model type that transformers knows as a causal language model: its route, its ids, its speed.

    python -m benchmarks model_types [--types gpt2,gemma2] [--kernels native] [--page docs/reference/model-types.md]
    python -m benchmarks model_types --types gpt2,gemma2 --update --page docs/reference/model-types.md

For each type a small random model of its own configuration class is made and loaded by the route that `--model-route
auto` takes. Its greedy ids over 64 tokens must be those of transformers' generate(), alone and in a full engine with
chunked prompts, preemption and cached prefixes. Then a wider one continues `--batch` prompts, in turns with generate():
processor time of one thread each, the best of `--rounds`, since the machine may be shared. In so small a model much of
the time is Python's on both sides. A type that is refused has the reason of its start in the table. With `--update` the
page's rows of other types stay; those of an earlier transformers are marked. `--untimed` leaves the second part
out, and keeps the speed that the page has; `--unchecked` the first part, and keeps what the page says of ids and
starts. Ids of the timed answers must be equal, too.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
import transformers
from factories.engine.fake_engine import Answer, collect, engine_config, request
from factories.engine.pools import add_states
from factories.models.model_types import VOCAB_SIZE, check_ids, model_types, reference_of, tiny_model_type
from penstock.common.errors import StartupError
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.engine import Engine
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import FAMILIES, load_model, read_model_config
from penstock.generation.runner.model_runner import ModelRunner
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks._arguments import at_least, parts, refuse
from benchmarks._report import Report, environment

PROMPT = 24
# Of types that were seen below generate()'s speed, by their profiles (dev/log/families.md).
_REASONS = {
    "jetmoe": "experts of a form of its own, in its attention too, are transformers' on both sides",
    "kimi_linear": "most of the time is one pass of the prompt through its modules, on both sides",
    "nemotron_h": "experts without a gate are transformers'",
}


class Row(NamedTuple):
    """A line of the table; `speed` 0: not measured."""

    model_type: str
    route: str
    ids: str
    speed: float = 0.0
    remark: str = ""


def measure(model_type: str, device: CPUDevice, options: argparse.Namespace, old: Row) -> Row:
    """Make, load, compare and time a type. `old` is its row by an earlier run."""
    with tempfile.TemporaryDirectory() as place:
        if options.unchecked:
            return timed(Path(place), old, device, options) if old.ids == "equal" else old
        try:
            folder = tiny_model_type(Path(place) / "small", model_type)
        except ImportError as error:
            library = re.search(r"requires the (\S+) library", str(error))
            what = said(error) if library is None else f"a part of it needs {library[1]}"
            return Row(model_type, "–", "", remark=f"not tried: {what}")
        except Exception as error:  # whatever a configuration class raises
            why = refusal_of(Path(place) / "config", model_type)
            if why:
                return Row(model_type, "refused", "", remark=why)
            return Row(model_type, "–", "", remark=f"no small configuration is made of it ({said(error)})")
        try:
            model = load_model(folder, dtype="float32", device=device)
        except StartupError as error:
            return Row(model_type, "refused", "", remark=reason_of(error, folder))
        try:
            check_ids(folder, model)
        except Exception as error:  # of either side
            return Row(model_type, model.config.route, "differ", remark=said(error))
        if options.untimed:
            return Row(model_type, model.config.route, "equal", old.speed, old.remark if old.speed else "not timed")
        return timed(Path(place), Row(model_type, model.config.route, "equal"), device, options)


def refusal_of(folder: Path, model_type: str) -> str:
    """Return why a type is refused by its standard configuration; empty where that is not, or there is none."""
    try:
        CONFIG_MAPPING[model_type]().save_pretrained(folder)
        read_model_config(folder)
    except StartupError as error:
        return reason_of(error, folder)
    except Exception:  # whatever a configuration class raises
        return ""
    return ""


def reason_of(error: StartupError, folder: Path) -> str:
    """Return the reason of a start, as the table has room for it."""
    why = error.message.partition(": ")[2] if error.message.startswith("MODEL: ") else error.message
    return why.replace(str(folder), "…").replace("|", "/")


def timed(place: Path, row: Row, device: CPUDevice, options: argparse.Namespace) -> Row:
    """Return the row of a type with equal ids with its speed, or why it has none."""
    try:
        sizes = {"hidden_size": options.hidden, "intermediate_size": 2 * options.hidden}
        wide = tiny_model_type(place / "wide", row.model_type, **sizes)
        speed = relative_speed(wide, load_model(wide, dtype="float32", device=device), device, options)
    except Exception as error:  # the sizes do not fit every type
        return row._replace(speed=0.0, remark=f"not timed ({said(error)})")
    return row._replace(speed=speed, remark=_REASONS.get(row.model_type, "") if speed < 1 else "")


def said(error: Exception) -> str:
    """Kind and text of an error in one line, as the table has room for it."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160].replace("|", "/")


def relative_speed(folder: Path, model: LanguageModel, device: CPUDevice, options: argparse.Namespace) -> float:
    """Return generate()'s processor time over ours for the same tokens."""
    reference = reference_of(folder)
    ids = torch.randint(3, VOCAB_SIZE, (options.batch, PROMPT), generator=torch.Generator().manual_seed(1))
    settings = transformers.GenerationConfig(
        max_new_tokens=options.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ours, theirs = [], []
    for _ in range(options.rounds):
        began = time.thread_time()
        with torch.inference_mode():
            found = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        theirs.append(time.thread_time() - began)
        engine, answers = new_engine(model, device, options), dict[str, Answer]()
        for number, row in enumerate(ids.tolist()):
            engine.add(request(row, request_id=str(number), max_new_tokens=options.tokens))
        began = time.thread_time()
        while engine.has_work:
            collect(answers, engine.step())
        ours.append(time.thread_time() - began)
        if [answers[str(number)].ids[0] for number in range(len(ids))] != found[:, PROMPT:].tolist():
            raise ValueError("other ids than generate()'s")
    return min(theirs) / min(ours)


def new_engine(model: LanguageModel, device: CPUDevice, options: argparse.Namespace) -> Engine:
    """Make an engine with room for all prompts."""
    facts, blocks = model.config, options.batch * ((PROMPT + options.tokens) // 16 + 1)
    kv = KVShape.of(facts, model.dtype, 16).pool(blocks, model.device)
    config = engine_config(
        num_blocks=blocks,
        block_size=16,
        max_batch_tokens=1024,
        max_running_sequences=options.batch,
        # As a start decides.
        prefix_cache=getattr(model, "continues", True),
        state_snapshot_tokens=GenerationServiceConfig.state_snapshot_tokens,
    )
    config = add_states(model, kv, config)
    return Engine(config, ModelRunner(model, kv, kernels=device.sampling_kernels()), None)


def read_page(path: Path) -> dict[str, Row]:
    """Return the rows of a page that was written before, marked where its transformers was another one."""
    text = path.read_text(encoding="utf-8")
    version = re.search(r"transformers (\d[\w.]*\w)", text)
    mark = "" if version is None or version[1] == transformers.__version__ else f"of transformers {version[1]}"
    rows = {}
    for line in text.splitlines():
        if line.startswith("| `") and not line.startswith("| `model_type`"):
            name, _, route, ids, speed, remark = (part.strip() for part in line.strip("|").split("|"))
            remark = remark if "of transformers" in remark else "; ".join(filter(None, (remark, mark)))
            rows[name.strip("`")] = Row(name.strip("`"), route, ids, float(speed or 0), remark)
    return rows


def speeds_of(path: Path) -> str:
    """Return the line of a page that tells when and where its speeds were measured; empty where there is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line for line in lines if line.startswith("Measured ")), "")


def page(rows: list[Row], options: argparse.Namespace) -> str:
    """Return the page."""
    facts = environment()
    served = [row for row in rows if row.ids == "equal"]
    native = sum(row.route == "native" for row in served)
    timed = sorted(row.speed for row in served if row.speed)
    earlier = sum("of transformers" in row.remark for row in rows)
    lines = [
        "# Model types",
        "",
        f"{len(served)} of the {len(rows)} types that transformers {transformers.__version__} knows as causal "
        f"language models start and give its greedy ids, {native} of them natively: small random",
        "models over 64 tokens, alone and in a full engine (`benchmarks/model_types.py`, which wrote this page). "
        f"`speed` is generate()'s time over Penstock's for {options.batch} sequences",
        f"of {options.tokens} tokens in float32, processor time of one thread, hidden size {options.hidden}"
        + (f" (median {timed[len(timed) // 2]:.2f})." if timed else "."),
        *([f"{earlier} rows are of an earlier run, as their remarks say."] if earlier else ()),
        "What the routes are, and what becomes of the others: [models](../guide/models.md).",
        "",
        options.measured or f"Measured {facts['time']}, {facts['cpu']}, {options.kernels} kernels.",
        "",
        "| `model_type` | class | route | ids | speed | remark |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(row.model_type, "")
        speed = f"{row.speed:.2f}" if row.speed else ""
        lines.append(f"| `{row.model_type}` | {name} | {row.route} | {row.ids} | {speed} | {row.remark} |")
    return "\n".join(lines) + "\n"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--types", type=parts, default=None, help="some of them; all by default")
    parser.add_argument("--kernels", default="auto", help="auto, native or torch")
    parser.add_argument("--batch", type=at_least(1), default=8)
    parser.add_argument("--tokens", type=at_least(1), default=32)
    parser.add_argument("--hidden", type=at_least(64), default=512, help="hidden size of the models that are timed")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--untimed", action="store_true", help="compare ids alone")
    parser.add_argument("--unchecked", action="store_true", help="time alone; --update's page has the ids")
    parser.add_argument("--page", type=Path, default=None, help="the page; standard output by default")
    parser.add_argument("--update", action="store_true", help="keep the rows of --page for types that are not measured")


def main(options: argparse.Namespace, _report: Report) -> None:
    """Measure, and write the page."""
    if options.update and (options.page is None or not options.page.exists()):
        refuse("--update: --page names no page")
    if options.unchecked and (options.untimed or not options.update):
        refuse("--unchecked: it times the types of a page, with --update and without --untimed")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    device = CPUDevice()
    device.start(num_threads=1, kernels=options.kernels)
    options.kernels = "C++" if device.instruction_set else "torch's"
    rows = read_page(options.page) if options.update else {}
    # Ids alone say nothing of the machine that the speeds are of.
    options.measured = speeds_of(options.page) if options.update and options.untimed else ""
    known: list[Any] = [*FAMILIES, *(name for name in model_types() if name not in FAMILIES)]
    for model_type in options.types or sorted(known):
        rows[model_type] = measure(model_type, device, options, rows.get(model_type, Row(model_type, "", "")))
        print(*rows[model_type], file=sys.stderr, flush=True)
        if options.page is not None:
            options.page.write_text(page(sorted(rows.values()), options), encoding="utf-8")
    if options.page is None:
        print(page(sorted(rows.values()), options))
