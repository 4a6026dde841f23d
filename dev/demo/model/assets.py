"""The demo model's shape, and the writing of its files."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from .hf import save_bf16
from .tokenizer import CONTROL_TOKENS, save_tokenizer, token_id

CONTEXT = 4096
"""Tokens of context the configuration admits; training rows are shorter (see batches.MAX_ROW)."""


def model_config(tokenizer: Tokenizer) -> Qwen2Config:
    """A four-layer Qwen2 of about four million parameters with tied embeddings."""
    end_of_text, _, im_end = (token_id(tokenizer, text) for text in CONTROL_TOKENS)
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


def save_model(model: Qwen2ForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes every file but the chat template, weights as bf16; the training model itself stays as it is."""
    end_of_text, _, im_end = (token_id(tokenizer, text) for text in CONTROL_TOKENS)
    save_bf16(model, folder, eos_token_ids=[im_end, end_of_text], pad_token_id=end_of_text)
    save_tokenizer(tokenizer, folder, CONTEXT)


def parameter_count(model: Qwen2ForCausalLM) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
