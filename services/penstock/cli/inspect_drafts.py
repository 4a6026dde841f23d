"""Trained drafts, as a folder's files tell: a head for another model, or layers for drafts that a model carries."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# As models.eagle3 has them, which imports torch.
_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# Tensors that every layer for multi-token prediction has: of DeepSeek, GLM and Kimi; of Qwen3-Next and 3.5; of MiMo.
_JOINTS = re.compile(r"model\.layers\.\d+\.eh_proj\.weight|mtp\.fc\.weight|model\.mtp_layers\.\d+\.input_proj\.weight")


def trained_drafts(values: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any] | None:
    """Return what a folder has to draft with; None: nothing. `is_model` is false of a head alone."""
    named = values.get("architectures")
    if isinstance(named, list) and any(name in _HEADS for name in named):
        return {"kind": "EAGLE-3", "is_model": False, "scored_ids": values.get("draft_vocab_size")}
    joints = [name for name in tensors if _JOINTS.fullmatch(name)]
    if not joints:
        return None
    # Penstock runs those of native families with DeepSeek's layout.
    return {"kind": "multi-token prediction", "is_model": True, "layers": len(joints)}


def drafts_line(found: Mapping[str, Any], *, is_native: bool) -> str:
    """Return a text for people."""
    if not found["is_model"]:
        return f"an {found['kind']} head: serve it beside the model that it was trained for, by --draft-head"
    layers = f"{found['layers']} layer{'' if found['layers'] == 1 else 's'} for {found['kind']}"
    return f"{layers}: {'--draft-head checkpoint' if is_native else 'not used, since the model is not native here'}"
