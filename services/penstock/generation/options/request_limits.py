"""Bounds on the lists and counts of one request."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.common.options import option

REQUESTS = "Limits of a request"


@dataclass(frozen=True, kw_only=True)
class RequestBounds:
    """Bounds that a server's owner may change. Each is declared here alone, as `EngineOptions`."""

    max_return_sequences: int = option(
        64,
        "Most sequences of one request; never more than --max-running-sequences.",
        group=REQUESTS,
        minimum=1,
    )
    max_stop_strings: int = option(32, "Most stop strings of one request.", group=REQUESTS, minimum=0)
    max_stop_string_chars: int = option(256, "Longest stop string.", group=REQUESTS, minimum=1)
    max_stop_token_sequences: int = option(64, "Most stop id sequences of one request.", group=REQUESTS, minimum=0)
    max_logit_bias: int = option(1024, "Most entries of logit_bias.", group=REQUESTS, minimum=0)
    max_score_items: int = option(256, "Most prompts with a continuation in one Score.", group=REQUESTS, minimum=1)
    max_embed_inputs: int = option(256, "Most inputs of one Embed.", group=REQUESTS, minimum=1)
    max_tensor_bytes: int = option(
        64 << 20,
        "Most bytes of output_scores, output_logits, output_hidden_states and output_attentions in one answer.",
        group=REQUESTS,
        minimum=0,
    )
    max_beams: int = option(
        64, "Most beams of one request; at most --max-running-sequences.", group=REQUESTS, minimum=1
    )
    max_draft_tokens: int = option(
        64,
        "Largest num_assistant_tokens, prompt_lookup_num_tokens, ngram_memory_num_tokens and lookahead_window.",
        group=REQUESTS,
        minimum=1,
    )
    max_matching_ngram: int = option(
        64, "Largest max_matching_ngram_size, ngram_memory_match and lookahead_ngram_size.", group=REQUESTS, minimum=1
    )
    max_lookahead_guesses: int = option(16, "Largest lookahead_guesses.", group=REQUESTS, minimum=1)
    max_ngram: int = option(
        256, "Largest no_repeat_ngram_size and encoder_no_repeat_ngram_size.", group=REQUESTS, minimum=0
    )
    max_bad_words: int = option(4096, "Most entries of bad_words_ids.", group=REQUESTS, minimum=0)
    max_sequence_bias: int = option(4096, "Most entries of sequence_bias.", group=REQUESTS, minimum=0)
    max_phrase_tokens: int = option(
        64,
        "Longest entry of bad_words_ids, sequence_bias, force_words_ids and constraints; longest end of a thought.",
        group=REQUESTS,
        minimum=1,
    )
    max_forced_words: int = option(
        64, "Most entries of force_words_ids, and of constraints.", group=REQUESTS, minimum=0
    )
    max_alternatives: int = option(64, "Most alternatives of a forced word.", group=REQUESTS, minimum=1)
    max_suppress_tokens: int = option(
        4096, "Most ids of suppress_tokens and begin_suppress_tokens.", group=REQUESTS, minimum=0
    )
    max_allowed_tokens: int = option(65_536, "Most ids of allowed_token_ids.", group=REQUESTS, minimum=0)
    max_trie_sequences: int = option(8192, "Most sequences of allowed_token_trie.", group=REQUESTS, minimum=0)
    max_trie_tokens: int = option(65_536, "Most ids of allowed_token_trie in total.", group=REQUESTS, minimum=0)
    max_watermark_context: int = option(
        64, "Largest context_width and ngram_len of a watermark.", group=REQUESTS, minimum=1
    )
    # SynthID: a layer costs a pass over the vocabulary, a table a byte an entry, a history 100 bytes a context.
    max_watermark_keys: int = option(64, "Most keys of a SynthID watermark.", group=REQUESTS, minimum=1)
    max_watermark_table: int = option(
        1 << 20, "Largest sampling_table_size of a SynthID watermark.", group=REQUESTS, minimum=0
    )
    max_watermark_history: int = option(
        8192, "Largest context_history_size of a SynthID watermark.", group=REQUESTS, minimum=0
    )
    # Half a millisecond of one core each at a vocabulary of 150 000.
    max_watermark_tokens: int = option(4096, "Most tokens of one DetectWatermark.", group=REQUESTS, minimum=2)
    max_plugins: int = option(
        4, "Most entries of logits_processor, and of stopping_criteria.", group=REQUESTS, minimum=0
    )
    max_plugin_bytes: int = option(4096, "Most bytes of one entry's parameters.", group=REQUESTS, minimum=0)
    max_tensor_steps: int = option(4096, "Most entries of tensor_steps.", group=REQUESTS, minimum=0)
    # With all else a message is at most 16 MiB, where --max-message-bytes is not raised.
    max_inputs_embeds_bytes: int = option(
        12 << 20,
        "Largest inputs_embeds; raise --max-message-bytes and a router's --max-request-bytes with it.",
        group=REQUESTS,
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True)
class RequestLimits(RequestBounds):
    """All bounds on the lists and counts of one request."""

    max_top_logprobs: int = 20
    max_stop_token_length: int = 32
    max_eos_token_ids: int = 64
    # False: the engine keeps no past outputs, so none can be drafted from.
    remembers_outputs: bool = True
    max_dola_layers: int = 256
    max_identifier_chars: int = 256
    # Prompt positions times entries each, so that Started stays below the 4 MiB that clients receive by default.
    max_prompt_logprob_entries: int = 150_000
    # Bytes of one output token's output_* tensors, so that a delta stays below 4 MiB.
    max_token_tensor_bytes: int = 3 << 20


DEFAULT_LIMITS = RequestLimits()
