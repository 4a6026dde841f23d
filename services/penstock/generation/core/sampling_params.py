"""Options of one request for the sampler and the stopping criteria, after defaults are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.generation.core.decoding_mode import (
    NO_GUIDANCE,
    PLAIN,
    AnyWatermark,
    DecodingMode,
    GenerationMode,
    GuidanceOptions,
    TensorOutputs,
)
from penstock.generation.core.plugins import RequestPlugins
from penstock.generation.core.thought_budget import ThoughtBudget

_MIX = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1

TokenSequence = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved options of one request. Names and meanings are GenerationConfig's (transformers) where it has them.

    The default of a field switches its processor off, so a processor is active iff its value differs from the default.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_h: float | None = None
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    encoder_repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    no_repeat_ngram_size: int = 0
    encoder_no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[TokenSequence, ...] = ()
    sequence_bias: Mapping[TokenSequence, float] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_ids: tuple[int, ...] = ()
    # (start_index in output tokens, decay_factor)
    exponential_decay_length_penalty: tuple[int, float] | None = None
    # Ids that may be drawn; None: every id.
    allowed_token_ids: frozenset[int] | None = None
    # Every output is one of these sequences or a prefix of one; None: off.
    allowed_token_trie: tuple[TokenSequence, ...] | None = None
    # None: thoughts have no budget of the request's own.
    thinking_budget_tokens: int | None = None
    watermark: AnyWatermark | None = None
    renormalize_logits: bool = False
    remove_invalid_values: bool = False
    token_healing: bool = False
    seed: int = 0
    num_return_sequences: int = 1
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[TokenSequence, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string_in_output: bool = False
    skip_special_tokens: bool = True
    # None: no logprobs; 0: of the chosen token only; k: also of the k most likely.
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Seconds since first scheduled; None: no limit.
    max_time: float | None = None
    # Options and facts of the decoding mode.
    mode: DecodingMode = PLAIN
    guidance: GuidanceOptions = NO_GUIDANCE
    tensors: TensorOutputs | None = None
    # What keeps a budget of thinking; None: there is none, or no thought.
    thought_budget: ThoughtBudget | None = None
    # Plugins made for this request alone; None: it has none.
    plugins: RequestPlugins | None = None

    @property
    def ending_ids(self) -> tuple[int, ...]:
        """Ids after which a sequence ends: the end-of-sequence ids, unless it goes on after them."""
        return () if self.ignore_eos else self.eos_token_ids

    @property
    def limits_tokens(self) -> bool:
        """True when an option allows certain tokens only."""
        return self.allowed_token_ids is not None or self.allowed_token_trie is not None

    @property
    def generation_mode(self) -> GenerationMode:
        """Name and number of the mode, for reports."""
        return self.mode.generation_mode(do_sample=self.do_sample)


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of returned sequence `index`.

    Index 0 keeps `seed`; the others get splitmix64 of (seed, index), cut to 63 bits (the public range of seeds). So n
    requests with these seeds give the same outputs as one request with n > 1.
    """
    if index == 0:
        return seed
    z = (seed + _MIX * index) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1
