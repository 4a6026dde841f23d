"""Flags of the model's graphs: stages within the context, where the model is open, and what is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.graphs.graph import GraphStage
from penstock.generation.graphs.graph_limits import GraphLimits


def config(**flags: Any) -> GenerationServiceConfig:
    return from_env_and_flags(GenerationServiceConfig, flags)


def test_stages_are_every_length_with_every_batch_and_no_longer_than_the_context() -> None:
    flags = config(graph_lengths="2048,128,512", graph_batches="4, 1")
    limits = GraphLimits.of(flags, 600, 1.0)
    assert limits.stages == tuple(GraphStage(batch, length) for batch in (1, 4) for length in (128, 512, 600))
    assert GraphLimits.of(flags, 64, 1.0).stages == (GraphStage(1, 64), GraphStage(4, 64))


@pytest.mark.parametrize("text", ["", "0", "4,x", "-1", "1.5"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match="--graph-lengths") as caught:
        config(graph_lengths=text)
    assert caught.value.flag == "--graph-lengths"


def test_the_model_is_open_on_loopback_only_unless_it_is_said() -> None:
    public = {"host": "0.0.0.0", "insecure_bind": True}
    assert config().is_model_open
    assert not config(model_access="off").is_model_open
    assert not config(**public).is_model_open
    assert config(model_access="all").is_model_open
    with pytest.raises(StartupError, match="--model-access-token-file") as caught:
        config(model_access="all", **public)
    assert caught.value.flag == "--model-access-token-file"
    assert config(model_access="all", model_access_token_file="tokens", **public).is_model_open
    with pytest.raises(StartupError, match="--model-access"):
        config(model_access="some")
