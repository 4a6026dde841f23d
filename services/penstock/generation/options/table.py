"""Every option of a request, once: the fields of GenerationConfig, StopConfig and OutputConfig, in the proto's order.

A row is a field with its kind, bounds and words. Converters, checks, defaults, warnings, the command line's flags, the
reference page and the clients' keywords are loops over `CONFIG`, `STOP` and `OUTPUT`. To add a row:
docs/learn/add-an-option.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.generation.core.decoding_mode import AnyWatermark, AssistantSchedule, EarlyStopping, Scope
from penstock.generation.core.plugins import PluginChoice
from penstock.generation.options.compound_kinds import (
    CONSTRAINTS,
    DECAY,
    LAYERS,
    LOGIT_BIAS,
    PLUGINS,
    SEQUENCE_BIAS,
    SEQUENCES,
    STOP_SEQUENCES,
    TRIE,
    WATERMARK,
    WORDS,
)
from penstock.generation.options.kinds import (
    AT_LEAST_ONE,
    COUNT,
    CUTOFF,
    EARLY_STOPPING,
    ENTRIES,
    FINITE,
    FLAG,
    FLOAT32,
    INTEGER,
    NUMBER,
    NUMBERS,
    PENALTY,
    POSITIVE,
    PROMPT,
    ROUTER_TEXT,
    SCHEDULE,
    SEED_RANGE,
    SHARE,
    SIZE,
    STOP_STRINGS,
    TEXT,
    TOKEN_ID,
    TOKEN_ID_OR_IDS,
    TOKEN_IDS,
    TOKEN_SET,
    Alternatives,
    Bounds,
    TokenSequence,
)
from penstock.generation.options.option_spec import OptionSet, OptionSpec, row, specs_of

GENERATION, SEARCH, DRAFTS, GUIDANCE = "Generation", "Beams and other searches", "Drafts", "Guidance"
DEFAULT_TOP_K = 50
_AT_LEAST_TWO = Bounds(2)
_NOT_NEGATIVE, _POSITIVE_SHARE = Bounds(0.0), Bounds(0.0, 1.0, above=True)
_GONE = "5.x dropped it: 4.41.1"
_IN_VOCABULARY = "in the vocabulary"
_OPENAI, _OUTPUT_ONLY = "OpenAI's", "counts output tokens only"


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RequestOptions(OptionSet):
    """A GenerationConfig; also the shape of a model's generation_config.json, which has a lower precedence."""

    # Length.
    max_new_tokens: int | None = row(
        INTEGER, "Longest answer, in tokens.", bounds=COUNT, flags=GENERATION, default="up to the context",
        differs="unset: never 20, a warning tells the limit; cut at the context's end, with a warning",
    )  # fmt: skip
    min_new_tokens: int | None = row(
        INTEGER, "Shortest answer, in tokens.", bounds=SIZE, flags=GENERATION, default=0,
        allowed="above the maximum: warning",
    )  # fmt: skip
    max_length: int | None = row(
        INTEGER, "Longest prompt and answer together.", bounds=COUNT, allowed="more than the prompt",
        differs="– (`max_new_tokens` wins, with a warning)",
    )  # fmt: skip
    min_length: int | None = row(
        INTEGER, "Shortest prompt and answer together.", bounds=SIZE,
        differs="– (`min_new_tokens` wins, with a warning)",
    )  # fmt: skip
    max_time: float | None = row(
        NUMBER, "Seconds after which no further token is generated.", bounds=POSITIVE, param="max_time",
        differs="counts from when the request was first scheduled, not while it waits",
    )  # fmt: skip

    # Strategy.
    do_sample: bool | None = row(
        FLAG, "Sample instead of greedy search; most chat models' own files set it.", flags=GENERATION, default=False,
        differs="with `temperature` 0: greedy, with a warning", chooses=Scope.SAMPLING,
    )  # fmt: skip
    num_beams: int | None = row(
        INTEGER, "Number of beams; beam search when above 1.", bounds=COUNT, limit="max_beams", flags=SEARCH, default=1,
        silent=(1,), chooses=Scope.BEAMS,
    )  # fmt: skip
    num_beam_groups: int | None = row(
        INTEGER, "Groups of beams; diverse beam search when above 1.", bounds=COUNT, scopes=(Scope.BEAMS,), silent=(1,),
        flags=SEARCH, default=1, allowed="divides `num_beams`", differs=_GONE, chooses=Scope.BEAMS,
    )  # fmt: skip
    diversity_penalty: float | None = row(
        FLOAT32, "Penalty that makes groups of beams differ.", bounds=_NOT_NEGATIVE, scopes=(Scope.BEAMS,),
        silent=(0.0,), flags=SEARCH, default=0.0, allowed="above 0 iff there are groups",
        differs=f"{_GONE}, which took negative values for 0",
    )  # fmt: skip
    penalty_alpha: float | None = row(
        FLOAT32, "Contrastive search among top_k candidates when above 0.", bounds=_NOT_NEGATIVE,
        scopes=(Scope.CONTRASTIVE,), silent=(0.0,), flags=SEARCH, default=0.0,
        differs=f"{_GONE}; `top_k` candidates run at once, so they are bounded by `--max-running-sequences`",
        chooses=Scope.CONTRASTIVE,
    )  # fmt: skip
    length_penalty: float | None = row(
        FLOAT32, "Beams: above 0 prefers long answers.", bounds=FINITE, scopes=(Scope.BEAMS,), silent=(1.0,),
        flags=SEARCH, default=1.0,
    )  # fmt: skip
    early_stopping: EarlyStopping | None = row(
        EARLY_STOPPING, "Beams: when to stop.", scopes=(Scope.BEAMS,), silent=(EarlyStopping.FALSE,), flags=SEARCH,
        default=EarlyStopping.FALSE, allowed="false, true, never",
    )  # fmt: skip
    num_return_sequences: int | None = row(
        INTEGER, "Answers to return.", bounds=COUNT, limit="max_return_sequences", default=1,
        differs="allowed above 1 with greedy decoding, too: the answers are equal",
    )  # fmt: skip
    prompt_lookup_num_tokens: int | None = row(
        INTEGER, "Tokens to draft from the prompt's own n-grams; 0 is off.", bounds=SIZE,
        limit="max_draft_tokens", scopes=(Scope.LOOKUP,), silent=(0,), flags=DRAFTS, default=0,
        differs="0 is off, an error there", chooses=Scope.LOOKUP,
    )  # fmt: skip
    max_matching_ngram_size: int | None = row(
        INTEGER, "Longest n-gram that prompt lookup matches.", bounds=COUNT, limit="max_matching_ngram",
        scopes=(Scope.LOOKUP,), default=2, needs=("prompt_lookup_num_tokens",),
    )  # fmt: skip
    assistant_model: str | None = row(
        TEXT, "Name of the server's draft model.", scopes=(Scope.DRAFT_MODEL,), silent=("",), in_file=False,
        flags=DRAFTS,
        allowed="the served one (`--assistant-model`), else NOT_FOUND; empty: off",
        differs="a name, not a model object; it must share the tokenizer", chooses=Scope.DRAFT_MODEL,
    )  # fmt: skip
    num_assistant_tokens: int | None = row(
        INTEGER, "Tokens per draft of the draft model.", bounds=COUNT, limit="max_draft_tokens",
        scopes=(Scope.DRAFT_MODEL,), flags=DRAFTS, default=20, needs=("assistant_model",),
    )  # fmt: skip
    num_assistant_tokens_schedule: AssistantSchedule | None = row(
        SCHEDULE, "How num_assistant_tokens changes within a request.", scopes=(Scope.DRAFT_MODEL,),
        default=AssistantSchedule.CONSTANT, allowed="constant, heuristic, heuristic_transient",
        differs="`heuristic` starts anew with each request; there it continues from the request before",
        needs=("assistant_model",),
    )  # fmt: skip
    assistant_confidence_threshold: float | None = row(
        FLOAT32, "Stop drafting at a token less likely than this; 0 never stops.", bounds=SHARE,
        scopes=(Scope.DRAFT_MODEL,), default=0.4,
        differs="not adapted over requests: that would make an answer's speed depend on others",
        needs=("assistant_model",),
    )  # fmt: skip
    # "low", "high" or layer numbers.
    dola_layers: str | TokenSequence | None = row(
        LAYERS, "DoLa: low, high or layer numbers.", limit="max_dola_layers", scopes=(Scope.DOLA,), flags=SEARCH,
        allowed="`low`, `high`, or layers below the number of layers, 0 being the embedding",
        differs="5.x dropped it: 4.55.4, which ignored layers beyond the last; a `repetition_penalty` below 1.2 gives "
        "a warning, as there", chooses=Scope.DOLA,
    )  # fmt: skip
    guidance_scale: float | None = row(
        FLOAT32, "Classifier-free guidance: above 1 keeps closer to the prompt.", bounds=FINITE, flags=GUIDANCE,
        default=1.0,
    )  # fmt: skip
    negative_prompt_text: str | None = row(
        ROUTER_TEXT, "Text to steer away from.", router_only=True, oneof="negative_prompt", in_file=False,
        flags=GUIDANCE, allowed="at least one token, fewer than the context",
        differs="tokenized by the router, with the tokenizer's special tokens; a token client sends ids",
    )  # fmt: skip
    negative_prompt_ids: TokenSequence | None = row(
        PROMPT, "Text to steer away from, as ids.", scopes=(Scope.GUIDANCE,), oneof="negative_prompt", in_file=False,
        default="last prompt token", allowed="at least one id, fewer than the context",
    )  # fmt: skip

    # Scores.
    temperature: float | None = row(
        FLOAT32, "Above 1 flattens the distribution, below 1 sharpens it; 0 is greedy.", bounds=_NOT_NEGATIVE,
        scopes=(Scope.SAMPLING,), silent=(0.0, 1.0), param="temperature", flags=GENERATION, default=1.0,
        differs="> 0 there; 0 is greedy",
    )  # fmt: skip
    top_k: int | None = row(
        INTEGER, "Sample among the k most likely tokens; 0 is off.", bounds=SIZE,
        scopes=(Scope.SAMPLING, Scope.CONTRASTIVE), silent=(0, DEFAULT_TOP_K), param="top_k",
        flags=GENERATION, default=DEFAULT_TOP_K, differs="0 is off, as in 5.x's generate()",
    )  # fmt: skip
    top_p: float | None = row(
        FLOAT32, "Sample among the most likely tokens with this total probability.", bounds=SHARE,
        scopes=(Scope.SAMPLING,), silent=(1.0,), param="top_p", flags=GENERATION, default=1.0,
        allowed="0 keeps the most likely token",
    )  # fmt: skip
    min_p: float | None = row(
        FLOAT32, "Drop tokens less likely than this share of the top one.", bounds=SHARE, scopes=(Scope.SAMPLING,),
        silent=(0.0,), param="min_p", flags=GENERATION, default=0.0, differs="0 while greedy gives no warning",
    )  # fmt: skip
    top_h: float | None = row(
        FLOAT32, "Sample among the most likely tokens with this share of the entropy.", bounds=_POSITIVE_SHARE,
        scopes=(Scope.SAMPLING,), param="top_h", allowed="1 is not off: the 100 most likely", differs="new in 5.x",
    )  # fmt: skip
    typical_p: float | None = row(
        FLOAT32, "Sample among the most typical tokens (surprise nearest to the entropy) with this total probability.",
        bounds=_POSITIVE_SHARE, scopes=(Scope.SAMPLING,), silent=(1.0,), param="typical_p", default=1.0,
        allowed="1 is off", differs="above 1 is off there",
    )  # fmt: skip
    epsilon_cutoff: float | None = row(
        FLOAT32, "Drop tokens less likely than this; 0 is off.", bounds=CUTOFF, scopes=(Scope.SAMPLING,), silent=(0.0,),
        param="epsilon_cutoff", default=0.0, differs="other values are off there",
    )  # fmt: skip
    eta_cutoff: float | None = row(
        FLOAT32, "Drop tokens less likely than this; high entropy lowers the bound; 0 is off.", bounds=CUTOFF,
        scopes=(Scope.SAMPLING,), silent=(0.0,), param="eta_cutoff", default=0.0, differs="other values are off there",
    )  # fmt: skip
    repetition_penalty: float | None = row(
        FLOAT32, "Above 1: repeat less of prompt and answer.", bounds=POSITIVE, param="repetition_penalty",
        flags=GENERATION, default=1.0,
    )  # fmt: skip
    encoder_repetition_penalty: float | None = row(
        FLOAT32, "Above 1: repeat more of the prompt.", bounds=POSITIVE, param="encoder_repetition_penalty",
        default=1.0,
    )  # fmt: skip
    no_repeat_ngram_size: int | None = row(
        INTEGER, "Length of n-grams that may occur only once; 0 is off.", bounds=SIZE, limit="max_ngram",
        param="no_repeat_ngram_size", flags=GENERATION, default=0,
    )  # fmt: skip
    encoder_no_repeat_ngram_size: int | None = row(
        INTEGER, "Length of n-grams of the prompt that the answer may not repeat; 0 is off.", bounds=SIZE,
        limit="max_ngram", param="encoder_no_repeat_ngram_size", default=0,
    )  # fmt: skip
    bad_words_ids: tuple[TokenSequence, ...] | None = row(
        SEQUENCES, "Sequences that must not be generated.", limit="max_bad_words", param="bad_words_ids",
        allowed="no empty entry; at most `--max-phrase-tokens` each",
    )  # fmt: skip
    force_words_ids: tuple[Alternatives, ...] | None = row(
        WORDS, "Beams: phrases that must be generated; an entry may list alternatives.", limit="max_forced_words",
        allowed="no empty entry or alternative, none the beginning of another; at most `--max-alternatives` each",
        differs=_GONE, chooses=Scope.BEAMS,
    )  # fmt: skip
    constraints: tuple[Alternatives, ...] | None = row(
        CONSTRAINTS, "Beams: like force_words_ids, or transformers' own constraints.", limit="max_forced_words",
        in_file=False, allowed="phrasal or disjunctive, as above",
        differs=f"{_GONE}; own Constraint classes cannot travel", chooses=Scope.BEAMS,
    )  # fmt: skip
    renormalize_logits: bool | None = row(
        FLAG, "Turn scores into log-probabilities after all processors.", param="renormalize_logits", default=False
    )
    remove_invalid_values: bool | None = row(
        FLAG, "Replace NaN and infinities in scores.", param="remove_invalid_values", default=False
    )
    forced_bos_token_id: int | None = row(
        TOKEN_ID, "First token after a prompt of one token.", param="forced_bos_token_id", allowed=_IN_VOCABULARY
    )
    forced_eos_token_id: TokenSequence | None = row(
        TOKEN_ID_OR_IDS, "Last token of an answer that reaches its maximum length.", limit="max_eos_token_ids",
        param="forced_eos_token_ids", allowed=_IN_VOCABULARY,
    )  # fmt: skip
    # (start_index, decay_factor)
    exponential_decay_length_penalty: tuple[int, float] | None = row(
        DECAY, "(start_index, decay_factor): the end becomes more likely after start_index tokens.",
        scopes=(Scope.ENDING,), param="exponential_decay_length_penalty", allowed="decay_factor > 0",
        differs="factors ≤ 0 are accepted there",
    )  # fmt: skip
    suppress_tokens: TokenSequence | None = row(
        TOKEN_IDS, "Tokens that must not be generated.", limit="max_suppress_tokens", param="suppress_tokens",
        allowed=f"{_IN_VOCABULARY}; at least one token, and the forced ones, must remain",
    )  # fmt: skip
    begin_suppress_tokens: TokenSequence | None = row(
        TOKEN_IDS, "Tokens that the answer must not begin with.", limit="max_suppress_tokens",
        param="begin_suppress_tokens", allowed=_IN_VOCABULARY,
    )  # fmt: skip
    sequence_bias: tuple[tuple[TokenSequence, float], ...] | None = row(
        SEQUENCE_BIAS, "Added to the score of the token that would complete a sequence.", limit="max_sequence_bias",
        param="sequence_bias", allowed="no empty or repeated sequence; finite or −inf",
    )  # fmt: skip
    watermarking_config: AnyWatermark | None = row(
        WATERMARK, "Green-list or SynthID watermark: its fields, or transformers' class of either.",
        limit="max_watermark_context", param="watermark",
        allowed="greenlist_ratio (0, 1), bias finite, seeding_scheme lefthash or selfhash, hashing_key below 2⁶³; "
        "SynthID: 1 to `--max-watermark-keys` keys",
        differs="after the warpers, as in 5.x; 4.41 has green lists alone, before the warpers",
    )  # fmt: skip
    token_healing: bool | None = row(
        FLAG, "Choose the prompt's last token again, together with the text after it.", param="token_healing",
        default=False,
        allowed="needs a tokenizer.json beside the weights; not with a `constraint` or `prompt_logprobs`",
        differs="the prompt's text never changes and is not encoded again: see [decoding.md](../guide/decoding.md)",
    )  # fmt: skip
    frequency_penalty: float | None = row(
        FLOAT32, "Subtracted from a token's score for each time it was generated.", bounds=PENALTY,
        param="frequency_penalty", default=0.0, allowed=_OUTPUT_ONLY, differs=_OPENAI,
    )  # fmt: skip
    presence_penalty: float | None = row(
        FLOAT32, "Subtracted from the score of every token that was generated.", bounds=PENALTY,
        param="presence_penalty", default=0.0, allowed=_OUTPUT_ONLY, differs=_OPENAI,
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = row(
        LOGIT_BIAS, "Added to the scores of these ids.", limit="max_logit_bias", param="logit_bias", in_file=False,
        allowed=f"finite; {_IN_VOCABULARY}", differs=_OPENAI,
    )  # fmt: skip
    allowed_token_ids: TokenSequence | None = row(
        TOKEN_SET, "Only these ids are generated.", limit="max_allowed_tokens", param="allowed_token_ids",
        in_file=False, allowed=_IN_VOCABULARY, differs="Penstock's",
    )  # fmt: skip
    allowed_token_trie: tuple[TokenSequence, ...] | None = row(
        TRIE, "The answer is one of these sequences, or the beginning of one.", limit="max_trie_sequences",
        param="allowed_token_trie", in_file=False, allowed="no empty sequence; at most `--max-trie-tokens` altogether",
        differs="the declarative form of `prefix_allowed_tokens_fn`",
    )  # fmt: skip
    top_n_sigma: float | None = row(
        FLOAT32, "Drop tokens scored more than this many standard deviations below the highest; 0 is off.",
        bounds=_NOT_NEGATIVE, scopes=(Scope.SAMPLING,), silent=(0.0,), param="top_n_sigma", default=0.0,
        differs="llama.cpp's, before the temperature as there; below 0 is off there",
    )  # fmt: skip
    xtc_probability: float | None = row(
        FLOAT32, "Chance, per token, that the most likely choices are dropped (XTC); 0 is off.", bounds=SHARE,
        scopes=(Scope.SAMPLING,), silent=(0.0,), param="xtc_probability", default=0.0,
        differs="text-generation-webui's and llama.cpp's, after the other warpers; line ends and ends of sequence are "
        "no exception, as in llama.cpp",
    )  # fmt: skip
    xtc_threshold: float | None = row(
        FLOAT32, "XTC drops tokens at least this likely, except the least likely of them.", bounds=SHARE,
        scopes=(Scope.SAMPLING,), param="xtc_threshold", default=0.1, needs=("xtc_probability",),
        allowed="above 0.5 is off", differs="as above",
    )  # fmt: skip
    thinking_budget_tokens: int | None = row(
        INTEGER, "Most tokens of the thought before a chat's answer; then it is closed. 0: it is closed at once.",
        bounds=SIZE, param="thinking_budget_tokens", flags=GENERATION, in_file=False, default="no bound",
        allowed="refused in beam search; an answer without a thought: warning",
        differs="Penstock's; see [gateway.md](../guide/gateway.md#thinking)",
    )  # fmt: skip
    # Not from the model's file: every request of every caller would then draw the same. A file with a seed gets a
    # warning.
    seed: int | None = row(
        INTEGER, "Seed of the random draws: same seed, same answer.", bounds=SEED_RANGE, flags=GENERATION,
        in_file=False, default="drawn",
        differs="of the request, not of the process; Started reports the one used. One below 0, which the protos do "
        "not have, is sent as that plus 2⁶³: -1 is 2⁶³ − 1",
    )  # fmt: skip

    # Special ids. Files give them to ModelDefaults.
    eos_token_id: TokenSequence | None = row(
        TOKEN_ID_OR_IDS, "Ids that end a sequence, in place of the model's.", limit="max_eos_token_ids", in_file=False,
        default="the model's", allowed=f"{_IN_VOCABULARY}; see `ignore_eos` for none",
    )  # fmt: skip
    pad_token_id: int | None = row(
        TOKEN_ID, "Id that stands for a finished group of beams.", in_file=False,
        default="the model's, else the first end-of-sequence id", allowed=_IN_VOCABULARY,
        differs="answers are never padded",
    )  # fmt: skip
    bos_token_id: int | None = row(
        TOKEN_ID, "Id that replaces an empty prompt.", in_file=False, default="the model's", allowed=_IN_VOCABULARY,
    )  # fmt: skip

    # Plugins of the server's owner.
    logits_processor: tuple[PluginChoice, ...] | None = row(
        PLUGINS, "Logits processors of the server's owner, by name.", limit="max_plugins", in_file=False,
        allowed="loaded by `--logits-processor`; parameters: a JSON object of at most `--max-plugin-bytes`",
        differs="names, not objects; one row a call: see [sampling.md](../guide/sampling.md#the-owners-own)",
    )  # fmt: skip
    stopping_criteria: tuple[PluginChoice, ...] | None = row(
        PLUGINS, "Stopping criteria of the server's owner, by name.", limit="max_plugins", in_file=False,
        allowed="loaded by `--stopping-criteria`; parameters as above",
        differs="names, not objects; one row a call, without scores",
    )  # fmt: skip

    # Drafts that transformers does not have.
    ngram_memory_num_tokens: int | None = row(
        INTEGER, "Tokens to draft from past outputs of the same tenant; this output is remembered, too; 0 is off.",
        bounds=SIZE, limit="max_draft_tokens", scopes=(Scope.NGRAM_MEMORY,), silent=(0,), flags=DRAFTS, default=0,
        allowed="without a memory (`--ngram-memory-tenants 0`): warning", differs="Penstock's",
        chooses=Scope.NGRAM_MEMORY,
    )  # fmt: skip
    ngram_memory_match: int | None = row(
        INTEGER, "Fewest last tokens that must match a past output.", bounds=_AT_LEAST_TWO,
        limit="max_matching_ngram", scopes=(Scope.NGRAM_MEMORY,), default=3, differs="Penstock's",
        needs=("ngram_memory_num_tokens",),
    )  # fmt: skip
    lookahead_window: int | None = row(
        INTEGER, "Tokens to guess ahead; every step corrects the guesses of the step before; 0 is off.",
        bounds=SIZE, limit="max_draft_tokens", scopes=(Scope.LOOKAHEAD,), silent=(0,), flags=DRAFTS, default=0,
        differs="Penstock's, after Fu et al. 2024", chooses=Scope.LOOKAHEAD,
    )  # fmt: skip
    lookahead_ngram_size: int | None = row(
        INTEGER, "Length of the n-grams that lookahead takes from its guesses.", bounds=_AT_LEAST_TWO,
        limit="max_matching_ngram", scopes=(Scope.LOOKAHEAD,), default=4, differs="Penstock's",
        needs=("lookahead_window",),
    )  # fmt: skip
    lookahead_guesses: int | None = row(
        INTEGER, "N-grams that lookahead keeps for each first token.", bounds=COUNT, limit="max_lookahead_guesses",
        scopes=(Scope.LOOKAHEAD,), default=4, differs="Penstock's", needs=("lookahead_window",),
    )  # fmt: skip


@dataclass(frozen=True, init=False, eq=False, repr=False)
class StopOptions(OptionSet):
    """A StopConfig as plain data."""

    stop_strings: tuple[str, ...] = row(
        STOP_STRINGS, "The answer ends before any of these texts; matches never reach into the prompt.", unset=(),
        limit="max_stop_strings", default="the model's file",
        allowed="not empty; at most `--max-stop-string-chars` each; needs a tokenizer.json beside the weights",
    )  # fmt: skip
    stop_token_ids: tuple[TokenSequence, ...] = row(
        STOP_SEQUENCES, "The answer ends on any of these ids, or runs of ids.", unset=(),
        limit="max_stop_token_sequences", allowed=f"{_IN_VOCABULARY}; at most 32 each",
    )  # fmt: skip
    ignore_eos: bool | None = row(
        FLAG, "Continue after end-of-sequence ids and sequences.", param="ignore_eos", default=False
    )
    include_stop_string_in_output: bool | None = row(
        FLAG, "The answer ends after the stop string. Its ids always include the token that completed the string.",
        param="include_stop_string_in_output", default=False,
    )  # fmt: skip


@dataclass(frozen=True, init=False, eq=False, repr=False)
class OutputOptions(OptionSet):
    """An OutputConfig as plain data."""

    return_token_ids: bool | None = row(
        FLAG, "The answer carries token ids; between router and generation they always travel.", router_only=True,
        default=False,
    )  # fmt: skip
    top_logprobs: int | None = row(
        ENTRIES, "Most likely tokens to report log-probabilities of, at each position; 0: of the chosen token only.",
        limit="max_top_logprobs", param="top_logprobs",
    )  # fmt: skip
    prompt_logprobs: int | None = row(
        ENTRIES, "Like top_logprobs, for the prompt's positions.", limit="max_top_logprobs", param="prompt_logprobs",
        allowed="prompt tokens × (alternatives + 1) at most 150 000, so that Started stays below 4 MiB",
    )  # fmt: skip
    output_scores: bool | None = row(FLAG, "Scores after the processors.", default=False)
    output_logits: bool | None = row(FLAG, "The model's own scores.", default=False)
    output_hidden_states: bool | None = row(
        FLAG, "Hidden states of the position that the token was drawn from.", default=False
    )
    output_attentions: bool | None = row(FLAG, "Attentions of that position.", default=False)
    skip_special_tokens: bool | None = row(
        FLAG, "Leave special tokens out of the text; stop strings do not see them then.", param="skip_special_tokens",
        default=True,
    )  # fmt: skip
    echo: bool | None = row(
        FLAG, "The answer begins with the prompt. A client that sends ids gets a warning: it has the prompt already.",
        router_only=True, default=False,
    )  # fmt: skip
    stream_interval: int | None = row(
        INTEGER, "Tokens per delta; the last delta may be shorter.", bounds=AT_LEAST_ONE, default=1
    )
    scores_top_k: int | None = row(
        INTEGER, "Scores and logits per position, the highest ones; 0: all.", default=0,
        needs=("output_scores", "output_logits"),
    )  # fmt: skip
    tensor_steps: TokenSequence = row(
        NUMBERS, "Output positions, from 0, to return tensors for.", unset=(), limit="max_tensor_steps",
        default="every one",
        needs=("output_scores", "output_logits", "output_hidden_states", "output_attentions"),
    )  # fmt: skip

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the set output_* flags, in the proto's order."""
        return tuple(name for name in TENSORS if getattr(self, name))


CONFIG: dict[str, OptionSpec] = specs_of(RequestOptions, "config")
STOP: dict[str, OptionSpec] = specs_of(StopOptions, "stop")
OUTPUT: dict[str, OptionSpec] = specs_of(OutputOptions, "output")
RequestOptions.specs, StopOptions.specs, OutputOptions.specs = CONFIG, STOP, OUTPUT
SECTIONS: dict[str, dict[str, OptionSpec]] = {"config": CONFIG, "stop": STOP, "output": OUTPUT}
TENSORS = tuple(name for name in OUTPUT if name.startswith("output_"))
