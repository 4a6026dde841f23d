"""Trained drafts, as a folder's files tell: a head for another model, or layers for drafts that a model carries."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from penstock.generation.core.delta_heads import DELTA_TYPES
from penstock.generation.weights.draft_layers import QWEN_JOINT
from penstock.generation.weights.text_part import TEXT_PARTS

# As models.eagle3 has them, which imports torch.
_HEADS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# As models.dflash has them.
_BLOCK_HEADS = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
# Tensors that every layer for multi-token prediction has: of DeepSeek, GLM and Kimi; of Qwen3-Next and 3.5; of MiMo.
_DEEPSEEK = re.compile(r"model\.layers\.\d+\.eh_proj\.weight")
_JOINTS = re.compile(
    "|".join((_DEEPSEEK.pattern, re.escape(QWEN_JOINT), r"model\.mtp_layers\.\d+\.input_proj\.weight"))
)
# Types of models that have the second, and types of folders with such a model as their text part.
_QWEN_TYPES = (*DELTA_TYPES, *(whole for whole, text in TEXT_PARTS.items() if text in DELTA_TYPES))


def trained_drafts(values: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any] | None:
    """Return what a folder has to draft with; None: nothing. `is_model` is false of a head alone."""
    named = values.get("architectures")
    if isinstance(named, list) and any(name in _HEADS for name in named):
        return {"kind": "EAGLE-3", "is_model": False, "scored_ids": values.get("draft_vocab_size")}
    if isinstance(named, list) and any(name in _BLOCK_HEADS for name in named):
        return {"kind": "DFlash", "is_model": False, "scored_ids": None}
    joints = [name for name in tensors if _JOINTS.fullmatch(name)]
    if not joints:
        return None
    return {"kind": "multi-token prediction", "is_model": True, "layers": len(joints)}


def has_known_layout(values: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """True when a model's layers for drafts are named as DeepSeek's, or as Qwen's in its own: others are not read."""
    if any(map(_DEEPSEEK.fullmatch, tensors)):
        return True
    return values.get("model_type") in _QWEN_TYPES and QWEN_JOINT in tensors


def drafts_line(found: Mapping[str, Any]) -> str:
    """Return a text for people. `usable`: of a model's own layers, True when they can draft here."""
    if not found["is_model"]:
        article = "a" if found["kind"] == "DFlash" else "an"
        return f"{article} {found['kind']} head: serve it beside the model that it was trained for, by --draft-head"
    layers = f"{found['layers']} layer{'' if found['layers'] == 1 else 's'} for {found['kind']}"
    if found["usable"]:
        return f"{layers}: --draft-head checkpoint"
    return f"{layers}: not used here, which takes DeepSeek's and Qwen's layouts in a native model"
