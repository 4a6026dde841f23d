"""The files of the demo model: configuration, generation defaults, weights."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from .tokenizer import CONTROL_TOKENS, save_tokenizer

CONTEXT = 4096
"""Tokens of context the configuration admits; training rows are shorter (see batches.MAX_ROW)."""


def model_config(tokenizer: Tokenizer) -> Qwen2Config:
    """A four-layer Qwen2 of about four million parameters with tied embeddings."""
    end_of_text, _, im_end = (tokenizer.token_to_id(text) for text in CONTROL_TOKENS)
    return Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=im_end,
        pad_token_id=end_of_text,
        dtype=torch.bfloat16,
    )


def generation_config(tokenizer: Tokenizer) -> GenerationConfig:
    """Greedy by default: the demo's answers are facts and sums."""
    end_of_text, _, im_end = (tokenizer.token_to_id(text) for text in CONTROL_TOKENS)
    return GenerationConfig(do_sample=False, eos_token_id=[im_end, end_of_text], pad_token_id=end_of_text)


def save_model(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes every file but the chat template, weights as bf16; the training model itself stays as it is."""
    half = Qwen2ForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    half.config.dtype = torch.bfloat16
    half.generation_config = generation_config(tokenizer)
    half.save_pretrained(folder)
    save_tokenizer(tokenizer, folder, CONTEXT)


def parameter_count(model: Qwen2ForCausalLM) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; raises ValueError when it is something else."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value
