"""A request as its caller asks for it, before validation and defaults, and the facts to check it against. No proto."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.core.tensors import TensorData
from penstock.generation.core.thought_budget import ThoughtEnd
from penstock.generation.grammar.call_spec import CallSpec
from penstock.generation.grammar.spec import ConstraintSpec
from penstock.generation.options.table import OutputOptions, RequestOptions, StopOptions
from penstock.text.thoughts import Thought


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """A GenerateRequest as plain data."""

    request_id: str = ""
    attempt_epoch: int = 0
    prompt_token_ids: list[int] = field(default_factory=list)
    resumed_token_ids: list[list[int]] = field(default_factory=list)
    options: RequestOptions = field(default_factory=RequestOptions)
    stop: StopOptions = field(default_factory=StopOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    # Structured output, unchecked.
    constraint: ConstraintSpec | None = None
    # It may be closed before the limit of tokens.
    may_be_closed: bool = True
    # What holds tool calls, unchecked.
    calls: CallSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    cache_salt: str = ""
    fair_share_key: str = ""
    adapter: str = ""
    # Digest of the adapter that made the resumed ids; empty: any.
    adapter_digest: str = ""
    priority: int = 0
    tokenizer_fingerprint: str = ""
    model: str = ""
    # Seconds to the caller's deadline.
    timeout_seconds: float | None = None
    begins_text: bool = False
    # Markers of the thoughts before the answer, unchecked.
    thought: Thought | None = None
    # What closes the thought that takes its budget, unchecked.
    thought_end: ThoughtEnd | None = None
    # Embeddings of prompt tokens, unchecked: of all tokens, or of those before `prompt_token_ids`.
    inputs_embeds: TensorData | None = None
    inputs_embeds_before_ids: bool = False

    @property
    def take_time(self) -> bool:
        """True when a part of the request is made off the event loop before it is submitted."""
        return self.constraint is not None or self.inputs_embeds is not None or self.holds_calls

    @property
    def holds_calls(self) -> bool:
        """True when tool calls are held to a grammar: a constraint of the whole output leaves no room for calls, and
        forced words could contradict them."""
        is_forced = self.options.constraints or self.options.force_words_ids
        return self.calls is not None and self.constraint is None and not is_forced

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens, with an id or without."""
        if self.inputs_embeds is None:
            return len(self.prompt_token_ids)
        return self.inputs_embeds.shape[0] + (len(self.prompt_token_ids) if self.inputs_embeds_before_ids else 0)

    @property
    def num_placeholders(self) -> int:
        """Number of leading prompt tokens without an id."""
        return self.num_prompt_tokens - len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Defaults of the checkpoint's own files: generation_config.json, and the special ids."""

    options: RequestOptions = field(default_factory=RequestOptions)
    eos_token_ids: tuple[int, ...] = ()
    # End-of-sequence runs of more than one id.
    eos_sequences: tuple[tuple[int, ...], ...] = ()
    stop_strings: tuple[str, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of the served model that a request is checked against."""

    name: str
    vocab_size: int
    # Prompt and output together.
    max_context_tokens: int
    # sha256 of tokenizer.json; empty when the folder has none.
    tokenizer_fingerprint: str = ""
    # True: there is a token-to-bytes table, so stop strings can be matched.
    has_token_bytes: bool = False
    # False: the tokenizer must not be loaded (load_tokenizer), even if the folder has one.
    loads_tokenizer: bool = True
    num_layers: int = 1
    # Values of an embedding.
    hidden_size: int = 0
    # The output head is the embedding.
    tied_embeddings: bool = False
    # Unsupported fields of a request -> reasons, written to follow the field's name.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    # Name of the draft model served beside it; empty: none.
    assistant_model: str = ""
    # (parameters without the length, prompt tokens) -> most new tokens per sequence that fit context and KV pool; may
    # be below 1.
    max_output_tokens: Callable[[SamplingParams, int], int] | None = None
    # True for the name of a known adapter; None: there are none.
    has_adapter: Callable[[str], bool] | None = None

    @property
    def no_tokenizer(self) -> str:
        """Reason why texts cannot be matched, if they cannot."""
        if not self.loads_tokenizer:
            return "the tokenizer is not loaded (load_tokenizer, --load-tokenizer)"
        return "the model's folder has no tokenizer.json"
