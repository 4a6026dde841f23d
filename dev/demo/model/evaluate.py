"""Accuracy on the prompts held out of training, through transformers' own greedy generate()."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from dev.demo.corpus import HeldOutPrompt

from .hf import greedy, load_model, render
from .render import answer_of
from .tokenizer import PAD_TOKEN, token_id

BATCH = 64
SHORT, LONG = 72, 176
"""Most new tokens of an answer; LONG_FAMILIES get LONG."""
LONG_FAMILIES = frozenset({"lists", "long_answers", "east_asian", "penstock"})


class Outcome(NamedTuple):
    """One prompt, what the model answered (thoughts cut off), and whether that is right."""

    prompt: HeldOutPrompt
    answer: str
    right: bool


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Qwen2ForCausalLM, Tokenizer, str]:
    """The model in `dtype`, its tokenizer and its chat template, from the files in `folder`."""
    model = load_model(folder, dtype)
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), template


def prompt_ids(prompt: HeldOutPrompt, tokenizer: Tokenizer, template: str, thinking: bool | None = None) -> list[int]:
    """The prompt's token ids, ready for the answer."""
    text = render(template, prompt.messages, tools=prompt.tools or (), add_generation_prompt=True, thinking=thinking)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def evaluate(
    model: Qwen2ForCausalLM,
    tokenizer: Tokenizer,
    template: str,
    prompts: Sequence[HeldOutPrompt],
    thinking: bool | None = None,
) -> list[Outcome]:
    """Answers and judges every prompt; the outcomes come grouped by answer length, not in the order given."""
    order = sorted(prompts, key=lambda prompt: prompt.family in LONG_FAMILIES)
    outcomes: list[Outcome] = []
    for start in range(0, len(order), BATCH):
        part = order[start : start + BATCH]
        longest = LONG if any(prompt.family in LONG_FAMILIES for prompt in part) else SHORT
        asked = [prompt_ids(prompt, tokenizer, template, thinking) for prompt in part]
        answers = greedy(model, asked, longest, token_id(tokenizer, PAD_TOKEN))
        for prompt, ids in zip(part, answers, strict=True):
            answer = answer_of(tokenizer.decode(ids, skip_special_tokens=False))
            outcomes.append(Outcome(prompt, answer, prompt.checker(answer)))
    return outcomes


def accuracy(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """Family to (right, asked)."""
    table: dict[str, tuple[int, int]] = {}
    for outcome in outcomes:
        right, asked = table.get(outcome.prompt.family, (0, 0))
        table[outcome.prompt.family] = (right + outcome.right, asked + 1)
    return table
