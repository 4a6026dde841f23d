"""What a caller asks for, before validation and defaults. Plain data: None means unset. No torch, no proto."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestedOptions:
    """The fields of GenerationConfig that this release honours, and by name those it does not.

    Also the shape of a model's generation_config.json, which is the same message with a lower precedence.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    max_length: int | None = None
    min_length: int | None = None
    max_time: float | None = None
    do_sample: bool | None = None
    num_return_sequences: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    # Every other field that was set: name -> value, for those that have a value meaning "off".
    others: Mapping[str, object] = field(default_factory=dict)


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
    has_constraint: bool = False
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
    # (prompt tokens, sequences) -> most new tokens per sequence that context and KV pool hold; may be below 1.
    max_output_tokens: Callable[[int, int], int] | None = None

    def open_ended_tokens(self, prompt_tokens: int, num_sequences: int) -> int:
        """What an unset length means: up to the context, or to what the pool holds where that is less."""
        room = self.max_context_tokens - prompt_tokens
        if self.max_output_tokens is None:
            return room
        return max(min(room, self.max_output_tokens(prompt_tokens, num_sequences)), 1)


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
    max_identifier_chars: int = 256
    # Prompt positions times entries each, so that Started stays below the 4 MiB that clients receive by default.
    max_prompt_logprob_entries: int = 150_000
