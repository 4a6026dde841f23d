"""Names of options in other servers' APIs, by ours."""

from __future__ import annotations

from collections.abc import Mapping

# OpenAI's and vLLM's, which HTTP and KServe take beside ours. Over HTTP the first that is set wins; KServe refuses two.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "max_new_tokens": ("max_completion_tokens", "max_tokens"),
    "min_new_tokens": ("min_tokens",),
    "num_return_sequences": ("n",),
    "typical_p": ("typical",),
    "stop_strings": ("stop",),
    # The first is vLLM's. llama.cpp has two names: ours, and the second.
    "thinking_budget_tokens": ("thinking_token_budget", "reasoning_budget_tokens"),
    "include_stop_string_in_output": ("include_stop_str_in_output",),
}
# vLLM's of structured output: within `structured_outputs`, and behind `guided_`.
VLLM_CONSTRAINTS: Mapping[str, str] = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_SAME_IN_VLLM = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("seed", "ignore_eos", "logit_bias"),
)
# Fields of vLLM's SamplingParams.
VLLM_SAMPLING: Mapping[str, str] = {
    "eos_token_id": "stop_token_ids",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    **{name: name for name in _SAME_IN_VLLM},
}
