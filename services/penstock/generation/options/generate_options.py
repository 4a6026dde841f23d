"""What a caller asks for, before validation and defaults. Plain data: None means unset. No torch, no proto."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.grammar.spec import ConstraintSpec
from penstock.generation.options.request_options import RequestedOptions


@dataclass(frozen=True, slots=True)
class RequestedStop:
    """StopConfig."""

    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[tuple[int, ...], ...] = ()
    ignore_eos: bool | None = None
    include_stop_string_in_output: bool | None = None


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """OutputConfig. `tensors` names the set output_* flags."""

    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    echo: bool | None = None
    stream_interval: int | None = None
    tensors: tuple[str, ...] = ()
    scores_top_k: int | None = None
    # Output positions, from 0; empty: every one.
    tensor_steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """GenerateRequest."""

    request_id: str = ""
    attempt_epoch: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    resumed_token_ids: list[list[int]] = field(default_factory=list)
    options: RequestedOptions = field(default_factory=RequestedOptions)
    stop: RequestedStop = field(default_factory=RequestedStop)
    output: RequestedOutput = field(default_factory=RequestedOutput)
    # Structured output, unchecked.
    constraint: ConstraintSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    priority: int = 0
    tokenizer_fingerprint: str = ""
    model: str = ""
    # What is left of the caller's deadline.
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """What the checkpoint's own files say: generation_config.json, and the special ids."""

    options: RequestedOptions = field(default_factory=RequestedOptions)
    eos_token_ids: tuple[int, ...] = ()
    # End-of-sequence runs of more than one id.
    eos_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against."""

    name: str
    vocab_size: int
    # Prompt and output together.
    max_context_tokens: int
    # sha256 of tokenizer.json; empty when the folder has none.
    tokenizer_fingerprint: str = ""
    # A token-to-bytes table was built, so that stop strings can be matched.
    has_token_bytes: bool = False
    num_layers: int = 1
    # The output head is the embedding.
    tied_embeddings: bool = False
    # Name of the draft model that is served beside it; empty: none.
    assistant_model: str = ""
    # (parameters but for the length, prompt tokens) -> most new tokens per sequence that context and KV pool hold; may
    # be below 1.
    max_output_tokens: Callable[[SamplingParams, int], int] | None = None


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
    # Of one output token's output_* tensors, so that a delta stays below 4 MiB, and of a whole request's.
    max_token_tensor_bytes: int = 3 << 20
    max_tensor_bytes: int = 64 << 20
