"""Bounds on the lists and counts of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on the lists and counts of one request, from the service's configuration.

    Not slotted, so that the configuration can name these defaults.
    """

    max_return_sequences: int = 64
    max_top_logprobs: int = 20
    max_stop_strings: int = 32
    max_stop_string_chars: int = 256
    max_stop_token_sequences: int = 64
    max_stop_token_length: int = 32
    max_eos_token_ids: int = 64
    max_logit_bias: int = 1024
    max_beams: int = 64
    max_draft_tokens: int = 64
    max_matching_ngram: int = 64
    max_lookahead_guesses: int = 16
    max_ngram: int = 256
    max_bad_words: int = 4096
    max_sequence_bias: int = 4096
    # Ids of one entry of bad_words_ids, sequence_bias, force_words_ids and constraints.
    max_phrase_tokens: int = 64
    # Entries of force_words_ids and of constraints, and alternatives of each.
    max_forced_words: int = 64
    max_alternatives: int = 64
    max_suppress_tokens: int = 4096
    max_allowed_tokens: int = 65_536
    max_trie_sequences: int = 8192
    max_trie_tokens: int = 65_536
    max_watermark_context: int = 64
    # SynthID: a layer costs a pass over the vocabulary, a table a byte an entry, a history 100 bytes a context.
    max_watermark_keys: int = 64
    max_watermark_table: int = 1 << 20
    max_watermark_history: int = 8192
    # Owners' logits processors, and stopping criteria, of one request, and bytes of one's parameters.
    max_plugins: int = 4
    max_plugin_bytes: int = 4096
    # Of the data of inputs_embeds: with all else a message is at most 16 MiB, where --max-message-bytes is not raised.
    max_inputs_embeds_bytes: int = 12 << 20
    # False: the engine keeps no past outputs, so none can be drafted from.
    remembers_outputs: bool = True
    max_dola_layers: int = 256
    max_tensor_steps: int = 4096
    max_identifier_chars: int = 256
    # Prompt positions times entries each, so that Started stays below the 4 MiB that clients receive by default.
    max_prompt_logprob_entries: int = 150_000
    # Score and Embed.
    max_score_items: int = 256
    max_embed_inputs: int = 256
    # DetectWatermark: half a millisecond of one core each at a vocabulary of 150 000.
    max_watermark_tokens: int = 4096
    # Bytes of one output token's output_* tensors, so that a delta stays below 4 MiB, and of a whole request's.
    max_token_tensor_bytes: int = 3 << 20
    max_tensor_bytes: int = 64 << 20


DEFAULT_LIMITS = RequestLimits()
