"""LoRA adapters that peft itself made and saved, against peft's model: logits, merged and not, and greedy ids.

Needs peft, which brings accelerate and is no dependency of ours; the last run is in dev/log/lora.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.model_engine import load_tiny
from factories.models.adapters import LAYER_TARGETS, read_adapter
from factories.models.checkpoints import FAMILIES, reference_model, tiny_checkpoint
from factories.models.paged import PagedDriver, PagedSequence
from penstock.generation.layers.lora import AdapterWeights

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install --no-deps peft==0.18.0 accelerate")
PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 32, 38, 46, 264, 33, 83]
NEW_TOKENS = 12
PATTERNS = {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.1.self_attn.v_proj": 3, "up_proj": 7}}
OPTIONS: list[dict[str, Any]] = [
    {"r": 4},
    {"r": 8, "use_rslora": True},
    {"r": 16, **PATTERNS},
    {"r": 32, "target_modules": [*LAYER_TARGETS, "lm_head"]},
    {"r": 64, "target_modules": [*LAYER_TARGETS, "embed_tokens"]},
    {"r": 12, "modules_to_save": ["lm_head", "embed_tokens"]},
]


def trained(checkpoint: Path, options: dict[str, Any]) -> Any:
    """Return peft's model with random matrices."""
    torch.manual_seed(0)
    given = {"lora_alpha": 16, "target_modules": [*LAYER_TARGETS], "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(reference_model(checkpoint), peft.LoraConfig(**given))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "modules_to_save" in name:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: f"rank {options['r']}")
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_pefts_own_model(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    model = trained(checkpoint, options)
    model.save_pretrained(tmp_path / "adapter")
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        unmerged = model(input_ids=prompt).logits[0].float()
        lengths = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        ids = model.generate(input_ids=prompt, **lengths)[0, len(PROMPT) :].tolist()
        merged = model.merge_and_unload()(input_ids=prompt).logits[0].float()
    ours = load_tiny(checkpoint)
    weights = read_adapter(tmp_path / "adapter", ours).weights
    assert isinstance(weights, AdapterWeights)
    sequence, driver = PagedSequence(list(PROMPT), adapter=weights), PagedDriver(ours, num_blocks=40, block_size=8)
    driver.prefill([sequence], 9)
    found = torch.stack(sequence.logits)
    torch.testing.assert_close(found, unmerged, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(found, merged, atol=2e-4, rtol=2e-4)
    for _ in range(NEW_TOKENS):
        sequence.token_ids.append(int(sequence.logits[-1].argmax()))
        driver.step([(sequence, 1)])
    assert sequence.token_ids[len(PROMPT) :] == ids
