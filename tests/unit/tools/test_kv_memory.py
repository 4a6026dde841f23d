"""KV memory of published models is what their layers read, within a few per cent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from penstock.cli.inspect_cache import layer_sights

from tools.kv_memory import CONFIGS, LENGTHS, memory_of, table

MODELS = tuple(json.loads(CONFIGS.read_text(encoding="utf-8")))
SPARSE = ("deepseek-ai/DeepSeek-V3.2-Exp", "zai-org/GLM-5")
PAGE = Path(__file__).parents[3] / "docs" / "guide" / "models.md"


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_holds_at_most_a_twentieth_more_than_is_read(name: str) -> None:
    for length in LENGTHS.values():
        one = memory_of(name, length)
        assert one.least <= one.ours <= 1.05 * one.least
        # Its index keys are bytes, which choose other positions than transformers'.
        assert one.ours <= one.vllm * (1.1 if name in SPARSE else 1.0)
        # Between two tiles of the kernels up to 63 positions more are held, which counts in short contexts.
        near = [memory_of(name, length + more) for more in range(64)]
        most = 1.07 if length < 32_768 else 1.05
        assert sum(each.ours for each in near) <= most * sum(each.least for each in near)


def test_kinds_of_layers_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for values in json.loads(CONFIGS.read_text(encoding="utf-8")).values():
        count = values["num_hidden_layers"]
        known = CONFIG_MAPPING[values["model_type"]](**values).to_dict()
        assert layer_sights(values, count) == layer_sights({**values, "layer_types": known.get("layer_types")}, count)


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")
