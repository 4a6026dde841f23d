"""transformers' own processors for a row's options: built by its `_get_logits_processor`, for SamplingParams."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from penstock.generation.core.decoding_mode import SynthIdOptions
from penstock.generation.core.sampling_params import SamplingParams
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LlamaConfig,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

# Options with the same name on both sides -> the value that means "off" on ours.
_ALIKE: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_new_tokens": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "temperature": 1.0,
    "top_k": 0,
    "forced_bos_token_id": None,
    "exponential_decay_length_penalty": None,
    "renormalize_logits": False,
    "remove_invalid_values": False,
}


class ReferenceProcessors(GenerationMixin):
    """generate()'s processors without a model."""

    def __init__(self, vocab_size: int) -> None:
        self.config = LlamaConfig(vocab_size=vocab_size)

    def of(self, params: SamplingParams, prompt: list[int]) -> LogitsProcessorList:
        """Make the list that generate() would run for these options and this prompt."""
        config = GenerationConfig(
            do_sample=params.do_sample,
            max_length=len(prompt) + params.max_new_tokens,
            num_beams=getattr(params.mode, "num_beams", 1),
            num_return_sequences=1,
            **{name: getattr(params, name) for name, off in _ALIKE.items() if getattr(params, name) != off},
            **_converted(params),
        )
        for name, off in _ALIKE.items():
            if getattr(params, name) == off:
                # generate()'s own defaults differ: top_k is 50.
                setattr(config, name, None)
        eos = params.eos_token_ids
        config._eos_token_tensor = torch.tensor(eos) if eos else None
        return self._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=torch.tensor([prompt]),
            prefix_allowed_tokens_fn=_prefix_function(params, len(prompt)),
            logits_processor=LogitsProcessorList(),
            device="cpu",
        )


def _converted(params: SamplingParams) -> dict[str, Any]:
    """Convert options to the types that transformers takes."""
    options: dict[str, Any] = {}
    if params.sequence_bias:
        options["sequence_bias"] = [[list(ids), bias] for ids, bias in params.sequence_bias.items()]
    if params.bad_words_ids:
        options["bad_words_ids"] = [list(word) for word in params.bad_words_ids]
    if params.suppress_tokens:
        options["suppress_tokens"] = list(params.suppress_tokens)
    if params.begin_suppress_tokens:
        options["begin_suppress_tokens"] = list(params.begin_suppress_tokens)
    if params.forced_eos_token_ids:
        options["forced_eos_token_id"] = list(params.forced_eos_token_ids)
    if params.watermark is not None:
        kind = SynthIDTextWatermarkingConfig if isinstance(params.watermark, SynthIdOptions) else WatermarkingConfig
        options["watermarking_config"] = kind(**dataclasses.asdict(params.watermark))
    return options


def _prefix_function(params: SamplingParams, prompt_length: int) -> Any:
    paths, allowed = params.allowed_token_trie, params.allowed_token_ids
    if paths is not None:

        def follow_paths(_: int, ids_T: Tensor) -> list[int]:
            output = tuple(ids_T[prompt_length:].tolist())
            longer = [path for path in paths if path[: len(output)] == output]
            following = {path[len(output)] for path in longer if len(path) > len(output)}
            return sorted(following) + (list(params.eos_token_ids) if output in longer or not following else [])

        return follow_paths
    if allowed is not None:
        return lambda _, ids_T: sorted(allowed)
    return None
