"""Every native family in the engine: generate()'s greedy ids and beams, in a crowd that is chunked, preempted and hits
prefixes, past every window."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from factories.engine.fake_engine import engine_config, request
from factories.engine.model_engine import answers_alone, check_company, load_tiny
from factories.models.checkpoints import VOCAB_SIZE, reference_model, tiny_checkpoint
from penstock.generation.core.request import Request
from penstock.generation.engine.decoding.beam_options import BeamOptions

COMMON = [17, 203, 44, 9, 118, 60, 7, 91, 250, 33, 2, 140]
PROMPTS = [[*COMMON, *([5 + number] * (number + 1))] for number in range(5)]
NEW_TOKENS, BEAMS = 16, 3
DEFAULT = ("gemma2", "qwen3_moe", "glm4", "deepseek_v3", "deepseek_v32", "qwen3_5_text")
SLOW = ("phi3", "granite", "olmo2", "olmo3", "smollm3", "glm", "cohere", "cohere2", "gemma3_text", "mixtral")
LATENT = ("deepseek_v2", "sarvam_mla", "glm4_moe_lite", "youtu", "minicpm3", "glm_moe_dsa")
DELTA = ("qwen3_5_moe_text", "qwen3_next")


def crowd() -> list[Request]:
    greedy = [request(prompt, request_id=f"greedy {i}", max_new_tokens=NEW_TOKENS) for i, prompt in enumerate(PROMPTS)]
    beams = request(
        PROMPTS[2],
        request_id="beams",
        max_new_tokens=NEW_TOKENS,
        num_return_sequences=BEAMS,
        mode=BeamOptions(BEAMS),
    )
    return [*greedy, beams]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "family",
    [
        *DEFAULT,
        *(pytest.param(family, marks=pytest.mark.slow) for family in (*SLOW, "qwen2_moe", "gpt_oss", *LATENT, *DELTA)),
    ],
)
def test_a_crowd_gets_the_ids_of_generate(tmp_path: Path, family: str) -> None:
    folder = tiny_checkpoint(tmp_path, family, seed=3)
    model, reference = load_tiny(folder), reference_model(folder)
    config = engine_config(num_blocks=42, block_size=2, max_running_sequences=8, max_batch_tokens=24, prefix_cache=True)
    alone = answers_alone(model, crowd())
    engine = check_company(model, crowd, config, alone=alone)
    assert min(engine.stats.preemptions, engine.stats.prefix_hit_tokens, engine.stats.copy_on_write_blocks) > 0
    for item in crowd():
        answer = alone[item.request_id]
        found = reference.generate(
            torch.tensor([item.prompt_token_ids]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=VOCAB_SIZE - 1,
            num_beams=len(answer.ids),
            num_return_sequences=len(answer.ids),
        )
        expected = found[:, len(item.prompt_token_ids) :].tolist()
        assert answer.finished is not None
        assert [answer.ids[one.index] for one in answer.finished.sequences] == expected
