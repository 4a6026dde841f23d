"""Models by transformers' own modules give the ids of its generate(), alone and in a full, mixed engine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import model_engine
from factories.models.model_types import VOCAB_SIZE, greedy_ids, reference_of, tiny_model_type
from factories.models.run_kernels import cpu_device
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.core.request import Request
from penstock.generation.models.language_model import LanguageModel
from penstock.generation.models.registry import load_model

NEW_TOKENS = 64
# One of each kind: learned positions; soft caps and windows; sinks; widths that differ; chunks; a window that no
# argument tells; the fused projections of Phi; a head with a scale of its own.
USUAL = ("gpt2", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen2_moe", "phi3", "granite")
FALLBACK = ModelRoute("fallback")


def prompts(seed: int = 5) -> list[list[int]]:
    """Return prompts of many lengths; some begin as others do."""
    source = random.Random(seed)
    long = [source.randrange(3, VOCAB_SIZE) for _ in range(41)]
    short = [[source.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 17, 26)]
    return [long, *short, long[:24], [*long[:30], 7, 9]]


def load(folder: Path) -> LanguageModel:
    return load_model(folder, dtype="float32", device=cpu_device(), route=FALLBACK)


def requests(all_prompts: list[list[int]]) -> list[Request]:
    return [
        request(prompt, max_new_tokens=NEW_TOKENS, request_id=str(place)) for place, prompt in enumerate(all_prompts)
    ]


def check_ids(folder: Path) -> None:
    """Check that ids equal generate()'s: alone, beside others in chunks, after preemption, and over cached prefixes."""
    all_prompts = prompts()
    reference = reference_of(folder)
    wanted = [greedy_ids(reference, prompt, NEW_TOKENS) for prompt in all_prompts]
    model = load(folder)
    alone = run(model_engine(model), requests(all_prompts)[0])
    assert alone["0"].ids == {0: wanted[0]}
    # Room for about half of the sequences at full length.
    blocks = sum(len(prompt) + NEW_TOKENS for prompt in all_prompts) // 4 * 4 // 7
    crowded = engine_config(num_blocks=blocks, max_batch_tokens=20, max_running_sequences=7)
    engine = model_engine(model, crowded)
    for _ in range(2):
        found = run(engine, *requests(all_prompts))
        assert [found[str(place)].ids[0] for place in range(len(all_prompts))] == wanted
    assert engine.stats.preemptions > 0
    assert engine.stats.prefix_hit_tokens > 0


@pytest.mark.parametrize("model_type", USUAL)
def test_a_model_type_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    torch.set_num_threads(1)
    check_ids(tiny_model_type(tmp_path, model_type))
