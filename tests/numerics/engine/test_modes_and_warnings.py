"""The mode of a request, what is refused and what is warned about, held against transformers' own GenerationConfig."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from penstock.common.errors import InvalidArgument
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions, ModelDefaults, ModelFacts
from penstock.generation.options.resolve import Resolved, resolve
from penstock.generation.options.table import RequestOptions
from penstock.generation.options.validate import validate
from penstock.generation.wire.option_messages import to_options
from penstock.v1 import common_pb2, config_pb2
from transformers import GenerationConfig
from transformers.generation import configuration_utils

MODEL = ModelFacts("tiny", vocab_size=100, max_context_tokens=64, num_layers=8, has_token_bytes=True)
LIMITS = RequestLimits()
CHOICES: dict[str, tuple[Any, ...]] = {
    "do_sample": (None, False, True),
    "num_beams": (None, 1, 4),
    "num_beam_groups": (None, 1, 2),
    "diversity_penalty": (None, 0.5),
    "penalty_alpha": (None, 0.0, 0.6),
    "top_k": (None, 1, 4),
    "prompt_lookup_num_tokens": (None, 3),
    "dola_layers": (None, "low"),
    "force_words_ids": (None, [[1]]),
}


def combinations() -> Iterator[dict[str, Any]]:
    """Every combination of the choices that decide the mode."""
    for values in itertools.product(*CHOICES.values()):
        yield {name: value for name, value in zip(CHOICES, values, strict=True) if value is not None}


def message(options: dict[str, Any]) -> config_pb2.GenerationConfig:
    """transformers' keyword arguments as a GenerationConfig of the wire."""
    fields = dict(options)
    if "dola_layers" in fields:
        fields["dola_layers"] = config_pb2.DolaLayers(preset=fields["dola_layers"])
    if "force_words_ids" in fields:
        words = [
            config_pb2.WordAlternatives(alternatives=[common_pb2.TokenIds(ids=ids)])
            for ids in options["force_words_ids"]
        ]
        fields["force_words_ids"] = words
    return config_pb2.GenerationConfig(**{"max_new_tokens": 5, **fields})


def resolved(options: dict[str, Any]) -> Resolved:
    """Parameters of a request with `options`. Raises InvalidArgument."""
    asked: RequestOptions = to_options(message(options))
    command = GenerateOptions(prompt_token_ids=[1, 2, 3], options=asked)
    validate(command, MODEL, LIMITS)
    return resolve(command, ModelDefaults(eos_token_ids=(9,)), MODEL, LIMITS)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers logs what the tests look at otherwise."""
    logger = logging.getLogger(configuration_utils.__name__)
    level, logger.level = logger.level, logging.CRITICAL
    yield
    logger.level = level


def their_mode(options: dict[str, Any]) -> str:
    """transformers fills in top_k = 50 before it asks."""
    mode = GenerationConfig(**{"top_k": 50, **options}).get_generation_mode()
    # What 5.x does not run any more it names as 4.41 did.
    return str(mode.value)


def test_the_mode_is_transformers() -> None:
    accepted = 0
    for options in combinations():
        try:
            ours = resolved(options).params.generation_mode
        except InvalidArgument:
            continue
        assert ours.name.lower() == their_mode(options).lower(), options
        accepted += 1
    assert accepted > 300


def refused_by_441(options: dict[str, Any]) -> bool:
    """The rules of 4.41.1's GenerationConfig.validate and scorers, which 5.x lost together with the modes."""
    beams, groups = options.get("num_beams", 1), options.get("num_beam_groups", 1)
    diversity, sampling = options.get("diversity_penalty", 0.0), options.get("do_sample", False)
    if "force_words_ids" in options:
        return beams == 1 or sampling or groups > 1 or diversity > 0
    if beams == 1 or (groups == 1 and diversity == 0):
        return False
    return sampling or beams % groups != 0 or groups == 1 or diversity == 0


def test_combinations_are_refused_exactly_where_transformers_refuses_them() -> None:
    for options in combinations():
        try:
            resolved(options)
        except InvalidArgument:
            assert refused_by_441(options), options
        else:
            assert not refused_by_441(options), options


VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.7, 1.0),
    "top_p": (0.5, 1.0),
    "min_p": (0.1,),
    "top_h": (0.3,),
    "typical_p": (0.9, 1.0),
    "top_k": (20, 50),
    "epsilon_cutoff": (0.1, 0.0),
    "eta_cutoff": (0.1, 0.0),
    "length_penalty": (2.0, 1.0),
    "num_return_sequences": (1, 2, 5),
}


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}, {"num_beams": 4}, {"num_beams": 4, "do_sample": True}])
def test_what_transformers_warns_about_is_warned_about_and_what_it_refuses_is_refused(mode: dict[str, Any]) -> None:
    for name, values in VALUES.items():
        for value in values:
            options = {**mode, name: value}
            complaint, (told, refused) = complaint_of(options), answer_to(options)
            assert refused in ("", f"config.{name}")
            if refused:
                # transformers refuses it too, and not as one of the issues that it only warns about.
                assert complaint, options
                assert "GenerationConfig is invalid" not in complaint, options
            else:
                assert (f"config.{name} " in told) == (f"`{name}`" in complaint), options


def complaint_of(options: dict[str, Any]) -> str:
    """transformers' error or, strictly, its warnings; empty when it has neither."""
    try:
        GenerationConfig(**options).validate(strict=True)
    except ValueError as error:
        return str(error)
    return ""


def answer_to(options: dict[str, Any]) -> tuple[str, str]:
    """Our warnings, or the field that we refuse."""
    try:
        return " ".join(resolved(options).warnings), ""
    except InvalidArgument as error:
        return "", error.field or "?"


@pytest.mark.parametrize("forced", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_forced_token_must_not_be_suppressed(forced: str) -> None:
    value: Any = 7 if forced == "forced_bos_token_id" else [7, 8]
    for suppressed, possible in (([7, 8], False), ([6], True), ([8], True)):
        options = {forced: value, "suppress_tokens": suppressed}
        assert (complaint_of(options) == "") == possible
        assert answer_to(options)[1] == ("" if possible else "config.suppress_tokens")
