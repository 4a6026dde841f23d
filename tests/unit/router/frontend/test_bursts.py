"""Answers of which many tokens come at once: by the mode that the table of options says is chosen."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.router.frontend.convert import comes_in_bursts
from penstock.v1 import config_pb2, model_pb2, text_pb2


@pytest.mark.parametrize(
    ("config", "default", "output", "expected"),
    [
        ({}, {}, {}, False),
        ({"do_sample": True, "num_beams": 1}, {}, {}, False),
        ({"num_beams": 2}, {}, {}, True),
        ({}, {"num_beams": 3}, {}, True),
        ({"num_beams": 1}, {"num_beams": 3}, {}, False),
        ({"num_beams": 4, "num_beam_groups": 2}, {}, {}, True),
        ({"penalty_alpha": 0.6}, {}, {}, False),
        ({"prompt_lookup_num_tokens": 4}, {}, {}, False),
        ({}, {}, {"stream_interval": 2}, True),
        ({}, {}, {"stream_interval": 1}, False),
    ],
    ids=str,
)
def test_beams_and_long_deltas_do(
    config: dict[str, Any], default: dict[str, Any], output: dict[str, Any], expected: bool
) -> None:
    request = text_pb2.GenerateTextRequest(
        config=config_pb2.GenerationConfig(**config), output=config_pb2.OutputConfig(**output)
    )
    info = model_pb2.GetModelInfoResponse(default_config=config_pb2.GenerationConfig(**default))
    assert comes_in_bursts(request, info) is expected
    assert comes_in_bursts(request, None) is (expected and not default)
