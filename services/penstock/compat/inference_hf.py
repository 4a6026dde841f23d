"""Facts of Chinese-LLaMA-Alpaca-3's script inference_hf.py for `penstock infer`: prompts, template, ends, defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Options of a request that the script sets where a flag does not.
DEFAULTS: Mapping[str, Any] = {
    "do_sample": True,
    "temperature": 0.2,
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_new_tokens": 400,
}
PREDICTIONS_FILE = "./predictions.json"
SYSTEM_PROMPT = "You are a helpful assistant. 你是一个乐于助人的助手。"
# The questions that it asks where it has no file.
SAMPLES = ("为什么要减少污染，保护环境？", "你有什么建议？")
# Llama 3's control tokens, as a chat template; the tokenizer adds the token of the beginning.
LLAMA3_TEMPLATE = (
    "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
END_OF_TURN = "<|eot_id|>"
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", END_OF_TURN)


def llama3_text(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the text of a conversation in the template, up to where an answer begins."""
    turns = (f"<|start_header_id|>{one['role']}<|end_header_id|>\n\n{one['content']}<|eot_id|>" for one in messages)
    return f"{''.join(turns)}<|start_header_id|>assistant<|end_header_id|>\n\n"


def flag_of(name: str) -> str:
    """Return a flag in our spelling: the script's has _ for -."""
    return name.replace("_", "-")
