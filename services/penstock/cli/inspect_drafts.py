"""Trained drafts, as a folder's files tell: a head for another model, or layers for drafts that a model carries."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# As models.eagle3 has them, which imports torch.
_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# Tensors that every layer for multi-token prediction has: of DeepSeek, GLM and Kimi; of Qwen3-Next and 3.5; of MiMo.
_DEEPSEEK = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
_JOINTS = re.compile(_DEEPSEEK.pattern + r"|mtp\.fc\.weight|model\.mtp_layers\.\d+\.input_proj\.weight")


def trained_drafts(values: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any] | None:
    """Return what a folder has to draft with; None: nothing. `is_model` is false of a head alone."""
    named = values.get("architectures")
    if isinstance(named, list) and any(name in _HEADS for name in named):
        return {"kind": "EAGLE-3", "is_model": False, "scored_ids": values.get("draft_vocab_size")}
    joints = [name for name in tensors if _JOINTS.fullmatch(name)]
    if not joints:
        return None
    return {"kind": "multi-token prediction", "is_model": True, "layers": len(joints)}


def has_deepseeks_layout(tensors: Collection[str]) -> bool:
    """True when a model's layers for drafts are named as DeepSeek's: others are not read."""
    return any(map(_DEEPSEEK.fullmatch, tensors))


def drafts_line(found: Mapping[str, Any]) -> str:
    """Return a text for people. `usable`: of a model's own layers, True when they can draft here."""
    if not found["is_model"]:
        return f"an {found['kind']} head: serve it beside the model that it was trained for, by --draft-head"
    layers = f"{found['layers']} layer{'' if found['layers'] == 1 else 's'} for {found['kind']}"
    if found["usable"]:
        return f"{layers}: --draft-head checkpoint"
    return f"{layers}: not used here, which takes DeepSeek's layout in a native model"
