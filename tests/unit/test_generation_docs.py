"""docs/guide/generation-config.md says of every field what the code does with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from penstock.common.options import options_of
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.options.checks import BOUNDS, Bounds
from penstock.generation.options.generate_options import GenerateCommand, ModelDefaults, RequestLimits, ServedModel
from penstock.generation.options.request_options import GROUP_OF, RequestedOptions
from penstock.generation.options.resolve import resolve
from penstock.v1 import config_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "generation-config.md").read_text(encoding="utf-8")
SECTIONS: dict[str, Any] = {
    "config": config_pb2.GenerationConfig,
    "stop": config_pb2.StopConfig,
    "output": config_pb2.OutputConfig,
}


def rows(section: str) -> dict[str, list[str]]:
    """Field -> the cells after it, of one section's table."""
    text = PAGE.split(f"## `{section}`")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in re.split(r" ?\| ?", cells)] for name, cells in found}


CONFIG = rows("config")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_has_its_row(section: str) -> None:
    assert list(rows(section)) == [field.name for field in SECTIONS[section].DESCRIPTOR.fields]


def test_every_row_is_whole() -> None:
    assert {name: len(cells) for name, cells in CONFIG.items() if len(cells) != 4} == {}


def test_what_is_supported_is_what_the_code_takes() -> None:
    assert {name for name, cells in CONFIG.items() if cells[1] == "yes"} == set(GROUP_OF)
    assert {name for name, cells in CONFIG.items() if cells[1] == "router"} == {"negative_prompt_text"}


def in_words(bounds: Bounds) -> str:
    """As the page writes it."""
    if bounds.low is None:
        return "finite"
    low = f"{bounds.low:g}".replace("-", "−")
    if bounds.high is None:
        return f"{'>' if bounds.above else '≥'} {low}"
    return f"{'(' if bounds.above else '['}{low}, {bounds.high:g}{')' if bounds.below else ']'}"


@pytest.mark.parametrize("name", BOUNDS)
def test_the_allowed_values_are_those_of_the_code(name: str) -> None:
    assert CONFIG[name][2].startswith(in_words(BOUNDS[name]))


def defaults() -> dict[str, Any]:
    """What an option is when neither the request nor the model's file says anything; the warpers', while sampling."""
    model = ServedModel("tiny", vocab_size=100, max_context_tokens=50)
    known: dict[str, Any] = {}
    for options in (RequestedOptions.of(do_sample=True), RequestedOptions()):
        command = GenerateCommand(prompt_token_ids=[1], options=options)
        params = resolve(command, ModelDefaults(), model, RequestLimits()).params
        for part in (params, BeamOptions(1), AssistanceOptions()):
            known.update((name, getattr(part, name)) for name in GROUP_OF if hasattr(part, name) and name not in known)
    return {**known, "do_sample": params.do_sample}


def test_the_defaults_are_those_of_the_code() -> None:
    checked = 0
    for name, value in defaults().items():
        cell = CONFIG[name][0]
        if isinstance(value, bool):
            assert cell == str(value).lower(), name
        elif isinstance(value, (int, float)) and cell not in ("–", "drawn", "up to the context"):
            assert float(cell) == value, name
        else:
            continue
        checked += 1
    assert checked > 20


def test_every_flag_that_is_named_exists() -> None:
    flags = {option.flag for option in options_of(GenerationServiceConfig)} | {"--assistant-model"}
    assert set(re.findall(r"`(--[\w-]+)`", PAGE)) <= flags
