"""Keywords of the server's options, and the form in which each is taken; see _config_values.

Made from the server's table of options by `python tools/option_tables.py`: do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

# One phrase, or alternatives; one of them must appear.
Words = Sequence[int] | Sequence[Sequence[int]]


class OptionKeywords(TypedDict, total=False):
    """Options of GenerationConfig, StopConfig and OutputConfig."""

    # Longest answer, in tokens.
    max_new_tokens: int
    # Shortest answer, in tokens.
    min_new_tokens: int
    # Longest prompt and answer together.
    max_length: int
    # Shortest prompt and answer together.
    min_length: int
    # Seconds after which no further token is generated.
    max_time: float
    # Sample instead of greedy search; most chat models' own files set it.
    do_sample: bool
    # Number of beams; beam search when above 1.
    num_beams: int
    # Groups of beams; diverse beam search when above 1.
    num_beam_groups: int
    # Penalty that makes groups of beams differ.
    diversity_penalty: float
    # Contrastive search among top_k candidates when above 0.
    penalty_alpha: float
    # Beams: above 0 prefers long answers.
    length_penalty: float
    # Beams: when to stop.
    early_stopping: bool | Literal["never"]
    # Answers to return.
    num_return_sequences: int
    # Tokens to draft from the prompt's own n-grams; 0 is off.
    prompt_lookup_num_tokens: int
    # Longest n-gram that prompt lookup matches.
    max_matching_ngram_size: int
    # Name of the server's draft model.
    assistant_model: str
    # Tokens per draft of the draft model.
    num_assistant_tokens: int
    # How num_assistant_tokens changes within a request.
    num_assistant_tokens_schedule: Literal["constant", "heuristic", "heuristic_transient"]
    # Stop drafting at a token less likely than this; 0 never stops.
    assistant_confidence_threshold: float
    # DoLa: low, high or layer numbers.
    dola_layers: Literal["low", "high"] | Sequence[int]
    # Classifier-free guidance: above 1 keeps closer to the prompt.
    guidance_scale: float
    # Text to steer away from.
    negative_prompt: str | Sequence[int]
    # Text to steer away from, as ids.
    negative_prompt_ids: Sequence[int]
    # Above 1 flattens the distribution, below 1 sharpens it; 0 is greedy.
    temperature: float
    # Sample among the k most likely tokens; 0 is off.
    top_k: int
    # Sample among the most likely tokens with this total probability.
    top_p: float
    # Drop tokens less likely than this share of the top one.
    min_p: float
    # Sample among the most likely tokens with this share of the entropy.
    top_h: float
    # Sample among the most typical tokens (surprise nearest to the entropy) with this total probability.
    typical_p: float
    # Drop tokens less likely than this; 0 is off.
    epsilon_cutoff: float
    # Drop tokens less likely than this; high entropy lowers the bound; 0 is off.
    eta_cutoff: float
    # Above 1: repeat less of prompt and answer.
    repetition_penalty: float
    # Above 1: repeat more of the prompt.
    encoder_repetition_penalty: float
    # Length of n-grams that may occur only once; 0 is off.
    no_repeat_ngram_size: int
    # Length of n-grams of the prompt that the answer may not repeat; 0 is off.
    encoder_no_repeat_ngram_size: int
    # Sequences that must not be generated.
    bad_words_ids: Sequence[Sequence[int]]
    # Beams: phrases that must be generated; an entry may list alternatives.
    force_words_ids: Sequence[Words]
    # Beams: like force_words_ids, or transformers' own constraints.
    constraints: Sequence[Any]
    # Turn scores into log-probabilities after all processors.
    renormalize_logits: bool
    # Replace NaN and infinities in scores.
    remove_invalid_values: bool
    # First token after a prompt of one token.
    forced_bos_token_id: int
    # Last token of an answer that reaches its maximum length.
    forced_eos_token_id: int | Sequence[int]
    # (start_index, decay_factor): the end becomes more likely after start_index tokens.
    exponential_decay_length_penalty: tuple[int, float]
    # Tokens that must not be generated.
    suppress_tokens: Sequence[int]
    # Tokens that the answer must not begin with.
    begin_suppress_tokens: Sequence[int]
    # Added to the score of the token that would complete a sequence.
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]
    # Green-list or SynthID watermark: its fields, or transformers' class of either.
    watermarking_config: Any
    # Choose the prompt's last token again, together with the text after it.
    token_healing: bool
    # Subtracted from a token's score for each time it was generated.
    frequency_penalty: float
    # Subtracted from the score of every token that was generated.
    presence_penalty: float
    # Added to the scores of these ids.
    logit_bias: Mapping[int, float] | Mapping[str, float]
    # Only these ids are generated.
    allowed_token_ids: Sequence[int]
    # The answer is one of these sequences, or the beginning of one.
    allowed_token_trie: Sequence[Sequence[int]]
    # Drop tokens scored more than this many standard deviations below the highest; 0 is off.
    top_n_sigma: float
    # Chance, per token, that the most likely choices are dropped (XTC); 0 is off.
    xtc_probability: float
    # XTC drops tokens at least this likely, except the least likely of them.
    xtc_threshold: float
    # Most tokens of the thought before a chat's answer; then it is closed. 0: it is closed at once.
    thinking_budget_tokens: int
    # Seed of the random draws: same seed, same answer.
    seed: int
    # Ids that end a sequence, in place of the model's.
    eos_token_id: int | Sequence[int]
    # Id that stands for a finished group of beams.
    pad_token_id: int
    # Id that replaces an empty prompt.
    bos_token_id: int
    # Logits processors of the server's owner, by name.
    logits_processor: str | Sequence[Any] | Mapping[str, Mapping[str, Any]]
    # Stopping criteria of the server's owner, by name.
    stopping_criteria: str | Sequence[Any] | Mapping[str, Mapping[str, Any]]
    # Tokens to draft from past outputs of the same tenant; this output is remembered, too; 0 is off.
    ngram_memory_num_tokens: int
    # Fewest last tokens that must match a past output.
    ngram_memory_match: int
    # Tokens to guess ahead; every step corrects the guesses of the step before; 0 is off.
    lookahead_window: int
    # Length of the n-grams that lookahead takes from its guesses.
    lookahead_ngram_size: int
    # N-grams that lookahead keeps for each first token.
    lookahead_guesses: int

    # The answer ends before any of these texts; matches never reach into the prompt.
    stop_strings: str | Sequence[str]
    # The answer ends on any of these ids, or runs of ids.
    stop_token_ids: int | Sequence[int | Sequence[int]]
    # Continue after end-of-sequence ids and sequences.
    ignore_eos: bool
    # The answer ends after the stop string. Its ids always include the token that completed the string.
    include_stop_string_in_output: bool

    # The answer carries token ids; between router and generation they always travel.
    return_token_ids: bool
    # Most likely tokens to report log-probabilities of, at each position; 0: of the chosen token only.
    top_logprobs: int
    # Like top_logprobs, for the prompt's positions.
    prompt_logprobs: int
    # Scores after the processors.
    output_scores: bool
    # The model's own scores.
    output_logits: bool
    # Hidden states of the position that the token was drawn from.
    output_hidden_states: bool
    # Attentions of that position.
    output_attentions: bool
    # Leave special tokens out of the text; stop strings do not see them then.
    skip_special_tokens: bool
    # The answer begins with the prompt. A client that sends ids gets a warning: it has the prompt already.
    echo: bool
    # Tokens per delta; the last delta may be shorter.
    stream_interval: int
    # Scores and logits per position, the highest ones; 0: all.
    scores_top_k: int
    # Output positions, from 0, to return tensors for.
    tensor_steps: Sequence[int]


CONFIG: Mapping[str, str] = {
    "max_new_tokens": "plain",
    "min_new_tokens": "plain",
    "max_length": "plain",
    "min_length": "plain",
    "max_time": "plain",
    "do_sample": "plain",
    "num_beams": "plain",
    "num_beam_groups": "plain",
    "diversity_penalty": "plain",
    "penalty_alpha": "plain",
    "length_penalty": "plain",
    "early_stopping": "early_stopping",
    "num_return_sequences": "plain",
    "prompt_lookup_num_tokens": "plain",
    "max_matching_ngram_size": "plain",
    "assistant_model": "plain",
    "num_assistant_tokens": "plain",
    "num_assistant_tokens_schedule": "schedule",
    "assistant_confidence_threshold": "plain",
    "dola_layers": "layers",
    "guidance_scale": "plain",
    "negative_prompt_text": "prompt",
    "negative_prompt_ids": "prompt",
    "temperature": "plain",
    "top_k": "plain",
    "top_p": "plain",
    "min_p": "plain",
    "top_h": "plain",
    "typical_p": "plain",
    "epsilon_cutoff": "plain",
    "eta_cutoff": "plain",
    "repetition_penalty": "plain",
    "encoder_repetition_penalty": "plain",
    "no_repeat_ngram_size": "plain",
    "encoder_no_repeat_ngram_size": "plain",
    "bad_words_ids": "sequences",
    "force_words_ids": "words",
    "constraints": "constraints",
    "renormalize_logits": "plain",
    "remove_invalid_values": "plain",
    "forced_bos_token_id": "plain",
    "forced_eos_token_id": "ids",
    "exponential_decay_length_penalty": "decay",
    "suppress_tokens": "ids",
    "begin_suppress_tokens": "ids",
    "sequence_bias": "sequence_bias",
    "watermarking_config": "watermark",
    "token_healing": "plain",
    "frequency_penalty": "plain",
    "presence_penalty": "plain",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "ids",
    "allowed_token_trie": "trie",
    "top_n_sigma": "plain",
    "xtc_probability": "plain",
    "xtc_threshold": "plain",
    "thinking_budget_tokens": "plain",
    "seed": "plain",
    "eos_token_id": "ids",
    "pad_token_id": "plain",
    "bos_token_id": "plain",
    "logits_processor": "plugins",
    "stopping_criteria": "plugins",
    "ngram_memory_num_tokens": "plain",
    "ngram_memory_match": "plain",
    "lookahead_window": "plain",
    "lookahead_ngram_size": "plain",
    "lookahead_guesses": "plain",
    "negative_prompt": "prompt",
}

STOP: Mapping[str, str] = {
    "stop_strings": "strings",
    "stop_token_ids": "stop_sequences",
    "ignore_eos": "plain",
    "include_stop_string_in_output": "plain",
}

OUTPUT: Mapping[str, str] = {
    "return_token_ids": "plain",
    "top_logprobs": "plain",
    "prompt_logprobs": "plain",
    "output_scores": "plain",
    "output_logits": "plain",
    "output_hidden_states": "plain",
    "output_attentions": "plain",
    "skip_special_tokens": "plain",
    "echo": "plain",
    "stream_interval": "plain",
    "scores_top_k": "plain",
    "tensor_steps": "numbers",
}
