"""Rules that refuse a request, all of them: the request, and the field that the refusal names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.common.errors import InvalidArgument, NotFound, PenstockError
from penstock.v1 import common_pb2, config_pb2

NAN, INF = float("nan"), float("inf")
# One more than the ids of the demo model.
OUTSIDE = 4096


def ids(*token_ids: int) -> common_pb2.TokenIds:
    """One run of ids."""
    return common_pb2.TokenIds(ids=token_ids)


def word(*alternatives: common_pb2.TokenIds) -> config_pb2.WordAlternatives:
    """A word to force, by its alternatives."""
    return config_pb2.WordAlternatives(alternatives=alternatives)


def bias(*token_ids: int, by: float = 1.0) -> config_pb2.SequenceBias:
    """An entry of sequence_bias."""
    return config_pb2.SequenceBias(token_ids=token_ids, bias=by)


def layers(*indices: int) -> config_pb2.DolaLayers:
    """DoLa's layers by number."""
    return config_pb2.DolaLayers(indices=config_pb2.LayerIndices(indices=indices))


def trie(*sequences: common_pb2.TokenIds) -> config_pb2.AllowedTokenTrie:
    """An allowed_token_trie."""
    return config_pb2.AllowedTokenTrie(sequences=sequences)


def decay(start: int, factor: float) -> config_pb2.ExponentialDecayLengthPenalty:
    """An exponential_decay_length_penalty."""
    return config_pb2.ExponentialDecayLengthPenalty(start_index=start, decay_factor=factor)


def phrase(*token_ids: int) -> config_pb2.DecodingConstraint:
    """A phrasal constraint."""
    return config_pb2.DecodingConstraint(phrasal=ids(*token_ids))


@dataclass(frozen=True)
class Refusal:
    """One rule: the request's messages, and the refusal's text."""

    path: str
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    constraint: dict[str, Any] | None = None
    kind: type[PenstockError] = InvalidArgument

    def __str__(self) -> str:
        parts = (self.config, self.stop, self.output, self.constraint)
        return f"{self.path}-{'-'.join(str(part)[:40] for part in parts if part)}".replace("\n", " ")


def option(name: str, *values: Any, **also: Any) -> list[Refusal]:
    """Make a rule for an option for which none of `values` is possible, beside `also`."""
    return [Refusal(f"config.{name}", {**also, name: value}) for value in values]


def combination(path: str, **config: Any) -> Refusal:
    """Make a rule for options that are possible each but not together."""
    return Refusal(f"config.{path}", config)


SAMPLING = {"do_sample": True}
VALUES: list[Refusal] = [
    *option("thinking_budget_tokens", 5, num_beams=2),
    *option("max_new_tokens", 0),
    *option("max_length", 0),
    *option("max_time", 0, -1, NAN, INF),
    *option("num_beams", 0, 65),
    *option("num_beam_groups", 0),
    *option("diversity_penalty", -0.5, NAN, INF),
    *option("penalty_alpha", -0.5, NAN, INF),
    *option("length_penalty", NAN, INF, -INF),
    *option("early_stopping", 9),
    *option("num_return_sequences", 0, 1000, **SAMPLING),
    *option("prompt_lookup_num_tokens", 65),
    *option("max_matching_ngram_size", 0, 65, prompt_lookup_num_tokens=3),
    *option("ngram_memory_num_tokens", 65),
    *option("ngram_memory_match", 0, 1, 65, ngram_memory_num_tokens=3),
    *option("lookahead_window", 65),
    *option("lookahead_ngram_size", 0, 1, 65, lookahead_window=3),
    *option("lookahead_guesses", 0, 17, lookahead_window=3),
    *option("num_assistant_tokens", 0, 65),
    *option("num_assistant_tokens_schedule", 9),
    *option("assistant_confidence_threshold", -0.1, 1.1, NAN),
    Refusal("config.assistant_model", {"assistant_model": "nobody"}, kind=NotFound),
    *option(
        "dola_layers",
        config_pb2.DolaLayers(),
        config_pb2.DolaLayers(preset="middle"),
        layers(),
        layers(1, 4),
        layers(99),
    ),
    *option("guidance_scale", NAN, INF),
    *option("negative_prompt_ids", ids(), ids(OUTSIDE), ids(*[1] * 4096), guidance_scale=2.0),
    *option("temperature", -0.1, NAN, INF, **SAMPLING),
    *option("top_p", -0.1, 1.01, NAN, **SAMPLING),
    *option("min_p", -0.1, 1.01, NAN, **SAMPLING),
    *option("top_h", 0.0, -0.1, 1.01, NAN, **SAMPLING),
    *option("typical_p", 0.0, -0.1, 1.01, NAN, **SAMPLING),
    *option("epsilon_cutoff", -0.1, 1.0, NAN, **SAMPLING),
    *option("eta_cutoff", -0.1, 1.0, NAN, **SAMPLING),
    *option("top_n_sigma", -0.1, NAN, INF, **SAMPLING),
    *option("xtc_probability", -0.1, 1.1, NAN, **SAMPLING),
    *option("xtc_threshold", -0.1, 1.1, NAN, **SAMPLING),
    *option("repetition_penalty", 0, -1, NAN, INF),
    *option("encoder_repetition_penalty", 0, -1, NAN, INF),
    *option("frequency_penalty", -2.1, 2.1, NAN),
    *option("presence_penalty", -2.1, 2.1, NAN),
    *option("no_repeat_ngram_size", 257),
    *option("encoder_no_repeat_ngram_size", 257),
    *option("bad_words_ids", [ids()], [ids(1), ids(OUTSIDE)], [ids(1)] * 4097, [ids(*[1] * 65)]),
    *option(
        "force_words_ids",
        [word()],
        [word(ids())],
        [word(ids(OUTSIDE))],
        [word(ids(1), ids(1, 2))],
        [word(ids(1), ids(1))],
        [word(ids(1))] * 65,
        [word(*(ids(token) for token in range(65)))],
        [word(ids(*[1] * 65))],
        num_beams=4,
    ),
    *option(
        "constraints",
        [config_pb2.DecodingConstraint()],
        [phrase()],
        [phrase(OUTSIDE)],
        [config_pb2.DecodingConstraint(disjunctive=word())],
        [config_pb2.DecodingConstraint(disjunctive=word(ids(1), ids(1, 2)))],
        [phrase(1)] * 65,
        num_beams=4,
    ),
    *option("forced_bos_token_id", OUTSIDE),
    *option("forced_eos_token_id", [OUTSIDE], [1] * 65),
    *option("suppress_tokens", [OUTSIDE], [1] * 4097),
    *option("begin_suppress_tokens", [OUTSIDE], [1] * 4097),
    *option(
        "sequence_bias",
        [bias()],
        [bias(OUTSIDE)],
        [bias(1, by=NAN)],
        [bias(1, by=INF)],
        [bias(1), bias(1)],
        [bias(1)] * 4097,
        [bias(*[1] * 65)],
    ),
    *option("logit_bias", {OUTSIDE: 1.0}, {1: NAN}, {1: INF}, dict.fromkeys(range(1025), 1.0)),
    *option("allowed_token_ids", [OUTSIDE], [1] * 65_537),
    *option(
        "allowed_token_trie", trie(), trie(ids()), trie(ids(OUTSIDE)), trie(*[ids(1)] * 8193), trie(ids(*[1] * 65_537))
    ),
    *option("seed", 2**63),
    *option("eos_token_id", [OUTSIDE], [1] * 65),
    *option("pad_token_id", OUTSIDE),
    *option("bos_token_id", OUTSIDE),
    *(
        rule
        for name in ("logits_processor", "stopping_criteria")
        for rule in option(
            name,
            [config_pb2.Plugin(name="unknown")],
            [config_pb2.Plugin(name="a")] * 5,
            [config_pb2.Plugin(name="a", parameters=" " * 4097)],
        )
    ),
]
NESTED: list[Refusal] = [
    *(
        Refusal(
            f"config.watermarking_config.{name}",
            {"watermarking_config": config_pb2.WatermarkingConfig(**{name: value})},
        )
        for name, values in {
            "greenlist_ratio": (0.0, 1.0, -0.5, NAN),
            "bias": (NAN, INF),
            "hashing_key": (2**63,),
            "seeding_scheme": ("righthash", ""),
            "context_width": (0, 65),
        }.items()
        for value in values
    ),
    *(
        Refusal(
            f"config.watermarking_config.synthid.{name}",
            {
                "watermarking_config": config_pb2.WatermarkingConfig(
                    synthid=config_pb2.SynthIDTextWatermarkingConfig(**{"ngram_len": 3, "keys": [1], name: value})
                )
            },
        )
        for name, values in {
            "ngram_len": (0, 65),
            "keys": ([], [1] * 65),
            "context_history_size": (8193,),
            "sampling_table_seed": (2**63,),
            "sampling_table_size": (0, 2**20 + 1),
        }.items()
        for value in values
    ),
    Refusal(
        "config.watermarking_config.synthid",
        {
            "watermarking_config": config_pb2.WatermarkingConfig(
                bias=1.0, synthid=config_pb2.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1])
            )
        },
    ),
    *(
        Refusal(
            "config.exponential_decay_length_penalty.decay_factor",
            {"exponential_decay_length_penalty": decay(1, factor)},
        )
        for factor in (0.0, -1.0, NAN, INF)
    ),
]
COMBINATIONS: list[Refusal] = [
    combination("num_return_sequences", num_return_sequences=5, num_beams=4),
    combination("num_return_sequences", num_return_sequences=2, penalty_alpha=0.6, top_k=4),
    # Constrained beam search.
    combination("num_beams", force_words_ids=[word(ids(1))]),
    combination("num_beams", constraints=[phrase(1)], num_beams=1),
    combination("do_sample", force_words_ids=[word(ids(1))], num_beams=4, do_sample=True),
    combination("num_beam_groups", constraints=[phrase(1)], num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    combination("diversity_penalty", constraints=[phrase(1)], num_beams=4, diversity_penalty=0.5),
    # Group beam search.
    combination("do_sample", num_beams=4, num_beam_groups=2, diversity_penalty=0.5, do_sample=True),
    combination("num_beam_groups", num_beams=4, num_beam_groups=3, diversity_penalty=0.5),
    combination("num_beam_groups", num_beams=4, num_beam_groups=8, diversity_penalty=0.5),
    combination("diversity_penalty", num_beams=4, num_beam_groups=2),
    combination("diversity_penalty", num_beams=4, diversity_penalty=0.5),
    # Nothing would be left.
    combination("suppress_tokens", suppress_tokens=range(OUTSIDE)),
    combination("suppress_tokens", suppress_tokens=[7], forced_bos_token_id=7),
    combination("suppress_tokens", suppress_tokens=[7, 8], forced_eos_token_id=[7, 8]),
    combination("suppress_tokens", suppress_tokens=[7, 8], allowed_token_ids=[7]),
    # Contrastive search computes its candidates side by side.
    combination("top_k", penalty_alpha=0.6, top_k=4000),
    # Guidance.
    combination("guidance_scale", guidance_scale=1.5, num_beams=4, num_beam_groups=2, diversity_penalty=0.5),
    combination("guidance_scale", guidance_scale=1.5, num_beams=2, force_words_ids=[word(ids(1))]),
    combination("guidance_scale", guidance_scale=1.5, penalty_alpha=0.6, top_k=4),
    combination("guidance_scale", guidance_scale=1.5, prompt_lookup_num_tokens=3),
    combination("guidance_scale", guidance_scale=1.5, ngram_memory_num_tokens=3),
    # The prompt fills the total length.
    Refusal("config.max_length", {"max_length": 1}),
]
OTHERS: list[Refusal] = [
    Refusal("stop.stop_strings", stop={"stop_strings": [""]}),
    Refusal("stop.stop_strings", stop={"stop_strings": ["x" * 257]}),
    Refusal("stop.stop_strings", stop={"stop_strings": ["x"] * 33}),
    Refusal("stop.stop_token_ids", stop={"stop_token_ids": [ids()]}),
    Refusal("stop.stop_token_ids", stop={"stop_token_ids": [ids(OUTSIDE)]}),
    Refusal("stop.stop_token_ids", stop={"stop_token_ids": [ids(1)] * 65}),
    Refusal("stop.stop_token_ids", stop={"stop_token_ids": [ids(*[1] * 33)]}),
    Refusal("output.top_logprobs", output={"top_logprobs": 21}),
    Refusal("output.prompt_logprobs", output={"prompt_logprobs": 21}),
    Refusal("output.stream_interval", output={"stream_interval": 0}),
    Refusal("output.tensor_steps", output={"output_logits": True, "tensor_steps": range(4097)}),
    Refusal("constraint", {"num_beams": 4, "force_words_ids": [word(ids(1))]}, constraint={"json_object": True}),
    Refusal("config.token_healing", {"token_healing": True}, constraint={"json_object": True}),
    Refusal("config.token_healing", {"token_healing": True}, output={"prompt_logprobs": 1}),
    # Beams keep the tensors of all that may be returned.
    Refusal("output.output_scores", {"num_beams": 64, "max_new_tokens": 300}, output={"output_scores": True}),
    Refusal("output.output_scores", {"max_new_tokens": 4000}, output={"output_scores": True, "output_logits": True}),
    Refusal("constraint", constraint={}),
    Refusal("constraint.json_object", constraint={"json_object": False}),
    Refusal("constraint.json_schema", constraint={"json_schema": ""}),
    Refusal("constraint.json_schema", constraint={"json_schema": "{"}),
    Refusal("constraint.json_schema", constraint={"json_schema": '{"type": "nothing"}'}),
    Refusal("constraint.json_schema", constraint={"json_schema": '{"type": "integer", "minimum": 2, "maximum": 1}'}),
    Refusal("constraint.json_schema", constraint={"json_schema": f'{{"title": "{"x" * 1_000_000}"}}'}),
    Refusal("constraint.regex", constraint={"regex": ""}),
    Refusal("constraint.regex", constraint={"regex": "("}),
    Refusal("constraint.grammar", constraint={"grammar": ""}),
    Refusal("constraint.grammar", constraint={"grammar": "start: ]"}),
    Refusal("constraint.choice", constraint={"choice": config_pb2.Choices()}),
    Refusal("constraint.choice", constraint={"choice": config_pb2.Choices(values=["a", ""])}),
    Refusal("constraint.choice", constraint={"choice": config_pb2.Choices(values=["a", "a"])}),
]
REFUSALS: list[Refusal] = [*VALUES, *NESTED, *COMBINATIONS, *OTHERS]
# Fields for which every value is possible, alone or with others that a combination above refuses.
ALWAYS_POSSIBLE = {
    "min_new_tokens",
    "min_length",
    "do_sample",
    "renormalize_logits",
    "remove_invalid_values",
}
