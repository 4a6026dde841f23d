"""Fields of transformers' GenerationConfig, and arguments of its generate(), that are not options here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CACHE = "caches are the server's, see --kv-memory and --prefix-cache"
_COMPILER = "nothing is compiled for a request"
_RESULT = "every answer has all requested outputs"
# Name -> reason why it has no effect: it is accepted with a warning wherever options are.
WITHOUT_EFFECT: Mapping[str, str] = {
    "use_cache": _CACHE,
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "low_memory": _CACHE,
    "prefill_chunk_size": "prompts are computed in chunks of --max-batch-tokens",
    "compile_config": _COMPILER,
    "disable_compile": _COMPILER,
    "continuous_batching_config": "requests are batched continuously by the server's settings",
    "return_dict_in_generate": _RESULT,
    "return_dict": _RESULT,
    "decoder_start_token_id": "models that have an encoder are not served",
    "is_assistant": "a draft model is known by its place",
    "assistant_lookbehind": "drafts of another tokenizer are read anew as text",
    "target_lookbehind": "drafts of another tokenizer are read anew as text",
    "synced_gpus": "a model in several processes keeps them in step itself",
    "use_model_defaults": "the model's generation_config.json always applies, and the request takes precedence",
}
# Facts about a file that do not concern a caller: they are left out silently.
FACTS = frozenset({"transformers_version", "_from_model_config", "_commit_hash", "chat_format"})
_DRAFTS = "drafts come from assistant_model, prompt_lookup_num_tokens, ngram_memory_num_tokens or lookahead_window"
# Name -> alternative. Each would change the answer or its speed, so it is refused.
REFUSED: Mapping[str, str] = {
    "assistant_early_exit": f"the model's own first layers do not draft here: {_DRAFTS}",
    "assistant_ensemble_weight": "it mixes the draft model's scores into the answer, but drafts never "
    f"change an answer here: {_DRAFTS}",
    "use_mtp": "a checkpoint's layers for several tokens draft where the server has --draft-head checkpoint and the "
    f"request names it in assistant_model: {_DRAFTS}",
    "speculation_type": "a DFlash head drafts where the server has --draft-head and the request names it in "
    f"assistant_model: {_DRAFTS}",
    "custom_generate": "no decoding loop of the caller runs here: logits_processor and stopping_criteria take objects "
    "in process, and --logits-processor loads them by name",
    "encoder_outputs": "models that have an encoder are not served",
    "decoder_input_ids": "models that have an encoder are not served",
    "decoder_attention_mask": "models that have an encoder are not served",
    "pixel_values": "models read text here",
    "input_features": "models read text here",
}


def is_nothing(value: Any) -> bool:
    """True for None, False, and an empty list or mapping."""
    return value is None or value is False or (isinstance(value, list | tuple | dict) and not value)


def no_effect(name: str) -> str:
    """Return the warning about a field of WITHOUT_EFFECT."""
    return f"{name} has no effect: {WITHOUT_EFFECT[name]}"
