"""Accuracy on the prompts held out of training, through transformers' own greedy generate()."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from tools.demo_corpus import HeldOutPrompt

from .render import answer_of

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
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return model, Tokenizer.from_file(str(folder / "tokenizer.json")), template


def _prompt_ids(prompt: HeldOutPrompt, tokenizer: Tokenizer, template: str, thinking: bool | None) -> list[int]:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    text: str = render_jinja_template(
        [prompt.messages], tools=prompt.tools, chat_template=template, add_generation_prompt=True, **kwargs
    )[0][0]
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@torch.inference_mode()
def generate(model: Qwen2ForCausalLM, prompts: Sequence[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Greedy continuations of one left-padded batch, cut at the end token of each."""
    pad = int(model.config.pad_token_id)
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    ends = [int(model.config.eos_token_id), pad]
    output = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=pad,
    )
    return [row[width:].tolist() for row in output]


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
        answers = generate(model, [_prompt_ids(p, tokenizer, template, thinking) for p in part], longest)
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
