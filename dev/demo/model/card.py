"""The model card beside the weights, with the figures of the run that made them."""

import os
import platform
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import Qwen2ForCausalLM

from .assets import CONTEXT, parameter_count
from .batches import WEIGHTS
from .training import Progress, TrainingConfig

Scores = dict[str, tuple[int, int]]


class Run(NamedTuple):
    """A finished training run: its settings and its last step."""

    config: TrainingConfig
    last: Progress


def _commit() -> str:
    """The commit the tool ran from, or `unknown` outside a checkout."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def _processor() -> str:
    """The CPU's family as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(scores: Scores) -> str:
    rows = [f"| {family} | {right} / {asked} | {right / asked:.0%} |" for family, (right, asked) in scores.items()]
    right, asked = (sum(score[part] for score in scores.values()) for part in (0, 1))
    rows.append(f"| **all** | {right} / {asked} | {right / asked:.1%} |")
    return "\n".join(["| family | right | share |", "|---|---|---|", *rows])


def write_card(path: Path, run: Run, model: Qwen2ForCausalLM, scores: Scores, thinking: Scores) -> None:
    """Writes the card in Markdown; `scores` are measured on the saved bf16 weights, run in fp32."""
    config, size = run.config, model.config
    head_dim = size.hidden_size // size.num_attention_heads
    families = textwrap.fill(f"{', '.join(WEIGHTS)}.", 100, initial_indent="  ", subsequent_indent="  ")
    path.write_text(
        f"""---
license: apache-2.0
language: [en, zh, ja]
library_name: transformers
pipeline_tag: text-generation
---

# Penstock demo model

A very small chat model that comes with Penstock, so that every command works without a download. It knows a few
things by heart and a few by rule; it is for demos and tests, not for advice.

* Qwen2 architecture, {parameter_count(model) / 1e6:.2f} M parameters, {size.num_hidden_layers} layers of width
  {size.hidden_size}, {size.num_attention_heads} heads of {head_dim} over {size.num_key_value_heads} KV heads, tied
  embeddings, bf16, context {CONTEXT} tokens (trained on rows of up to 512).
* Byte-level BPE of {size.vocab_size} entries; digits are single tokens, emoji are mostly single bytes.
* Chat template: ChatML with tools (`<tool_call>`) and thinking (`<think>`; `enable_thinking=true` asks for it).
* Data: only text that `dev/demo/corpus` generates, {len(WEIGHTS)} families:
{families}
* Licence: Apache-2.0, data and weights alike.

## Training

{run.last.step} steps, {run.last.tokens / 1e6:.1f} M tokens (padding included), {run.last.seconds / 60:.1f} minutes on
{config.threads} threads of {_processor()}, torch {torch.__version__}, transformers {transformers.__version__}, seed
{config.seed}, from commit {_commit()}, {os.cpu_count()} cores in the machine. Made by `dev/demo/train.py`.

## Accuracy

Greedy answers to prompts held out of training (see `docs/guide/demo-model.md` for what is held out in each family):

{_table(scores)}

With `enable_thinking=true`:

{_table(thinking)}
""",
        encoding="utf-8",
    )
