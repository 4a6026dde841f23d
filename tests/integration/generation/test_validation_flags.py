"""Bounds of a request are flags of the generation service; and what a model without a tokenizer cannot do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from factories.engine.refusals import bias, ids, phrase, trie, word
from factories.models.checkpoints import tiny_checkpoint
from factories.servers.generation import Client, generation_service, request
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.v1 import config_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
BOUNDS = {
    "max_return_sequences": 2,
    "max_stop_strings": 1,
    "max_stop_token_sequences": 1,
    "max_logit_bias": 1,
    "max_beams": 2,
    "max_draft_tokens": 2,
    "max_matching_ngram": 2,
    "max_ngram": 2,
    "max_bad_words": 1,
    "max_sequence_bias": 1,
    "max_phrase_tokens": 2,
    "max_forced_words": 1,
    "max_alternatives": 2,
    "max_suppress_tokens": 1,
    "max_allowed_tokens": 1,
    "max_trie_sequences": 2,
    "max_trie_tokens": 4,
    "max_watermark_context": 2,
    "max_watermark_keys": 2,
    "max_watermark_table": 100,
    "max_watermark_history": 10,
    "max_plugins": 1,
    "max_plugin_bytes": 10,
    "max_tensor_steps": 1,
    "max_lookahead_guesses": 1,
}


def synthid(**fields: Any) -> config_pb2.WatermarkingConfig:
    marks = {"ngram_len": 2, "keys": [1], "context_history_size": 9, "sampling_table_size": 99, **fields}
    return config_pb2.WatermarkingConfig(synthid=config_pb2.SynthIDTextWatermarkingConfig(**marks))


# Flag -> what is just too much for it.
TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("max_return_sequences", {"num_return_sequences": 3, "do_sample": True}),
    ("max_logit_bias", {"logit_bias": {1: 1.0, 2: 1.0}}),
    ("max_beams", {"num_beams": 3}),
    ("max_draft_tokens", {"prompt_lookup_num_tokens": 3}),
    ("max_draft_tokens", {"num_assistant_tokens": 3}),
    ("max_draft_tokens", {"ngram_memory_num_tokens": 3}),
    ("max_draft_tokens", {"lookahead_window": 3}),
    ("max_matching_ngram", {"max_matching_ngram_size": 3}),
    ("max_matching_ngram", {"ngram_memory_match": 3}),
    ("max_matching_ngram", {"lookahead_ngram_size": 3}),
    ("max_lookahead_guesses", {"lookahead_guesses": 2}),
    ("max_ngram", {"no_repeat_ngram_size": 3}),
    ("max_ngram", {"encoder_no_repeat_ngram_size": 3}),
    ("max_bad_words", {"bad_words_ids": [ids(1), ids(2)]}),
    ("max_sequence_bias", {"sequence_bias": [bias(1), bias(2)]}),
    ("max_phrase_tokens", {"bad_words_ids": [ids(1, 2, 3)]}),
    ("max_phrase_tokens", {"sequence_bias": [bias(1, 2, 3)]}),
    ("max_phrase_tokens", {"force_words_ids": [word(ids(1, 2, 3))]}),
    ("max_phrase_tokens", {"constraints": [phrase(1, 2, 3)]}),
    ("max_forced_words", {"force_words_ids": [word(ids(1)), word(ids(2))]}),
    ("max_forced_words", {"constraints": [phrase(1), phrase(2)]}),
    ("max_alternatives", {"force_words_ids": [word(ids(1), ids(2), ids(3))]}),
    ("max_suppress_tokens", {"suppress_tokens": [1, 2]}),
    ("max_suppress_tokens", {"begin_suppress_tokens": [1, 2]}),
    ("max_allowed_tokens", {"allowed_token_ids": [1, 2]}),
    ("max_trie_sequences", {"allowed_token_trie": trie(ids(1), ids(2), ids(3))}),
    ("max_trie_tokens", {"allowed_token_trie": trie(ids(1, 2, 3), ids(1, 2))}),
    ("max_watermark_context", {"watermarking_config": config_pb2.WatermarkingConfig(context_width=3)}),
    ("max_watermark_context", {"watermarking_config": synthid(ngram_len=3)}),
    ("max_plugins", {"logits_processor": [config_pb2.Plugin(name="a")] * 2}),
    ("max_plugins", {"stopping_criteria": [config_pb2.Plugin(name="a")] * 2}),
    ("max_plugin_bytes", {"logits_processor": [config_pb2.Plugin(name="a", parameters='{"a": 1000}')]}),
    ("max_watermark_keys", {"watermarking_config": synthid(keys=[1, 2, 3])}),
    ("max_watermark_table", {"watermarking_config": synthid(sampling_table_size=101)}),
    ("max_watermark_history", {"watermarking_config": synthid(context_history_size=11)}),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """Tight bounds, and a model without a tokenizer."""
    folder: Path = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    async with generation_service(folder, kv_memory="1MiB", **BOUNDS) as running:
        yield running


async def refused_field(client: Client, **fields: Any) -> str | None:
    """The field of an InvalidArgument; nothing was accepted."""
    outcome = await client.generate(request(**fields))
    assert outcome.events == []
    assert isinstance(outcome.error, InvalidArgument)
    load = await client.load()
    assert (load.running_requests, load.waiting_requests, load.kv_blocks_used) == (0, 0, 0)
    return outcome.error.field


@pytest.mark.parametrize(("flag", "config"), TOO_MUCH, ids=lambda value: str(value).replace("\n", " ")[:50])
async def test_a_flag_bounds_its_option(client: Client, flag: str, config: dict[str, Any]) -> None:
    assert flag in BOUNDS
    field = await refused_field(client, config=config)
    assert field is not None
    assert field.removeprefix("config.").split(".")[0] in config


async def test_flags_bound_stops_and_tensor_steps(client: Client) -> None:
    two = [ids(1), ids(2)]
    assert await refused_field(client, stop={"stop_token_ids": two}) == "stop.stop_token_ids"
    assert await refused_field(client, stop={"stop_strings": ["a", "b"]}) == "stop.stop_strings"
    steps = {"output_logits": True, "tensor_steps": [0, 1]}
    assert await refused_field(client, output=steps) == "output.tensor_steps"


async def test_text_needs_a_tokenizer(client: Client) -> None:
    assert await refused_field(client, stop={"stop_strings": ["a"]}) == "stop.stop_strings"
    assert await refused_field(client, config={"token_healing": True}) == "config.token_healing"
    outcome = await client.generate(request(constraint=config_pb2.Constraint(regex="a+")))
    assert isinstance(outcome.error, FailedPrecondition)
    assert (outcome.events, outcome.error.field) == ([], "constraint")


async def test_what_is_just_within_the_bounds_runs(client: Client) -> None:
    within = {
        "bad_words_ids": [ids(1, 2)],
        "sequence_bias": [bias(1, 2)],
        "suppress_tokens": [1],
        "no_repeat_ngram_size": 2,
        "allowed_token_trie": trie(ids(4, 5), ids(6, 7)),
        "logit_bias": {1: 1.0},
        "num_beams": 2,
        "num_return_sequences": 2,
    }
    outcome = await client.generate(request(config=within))
    assert outcome.error is None
    assert outcome.started.generation_mode
    await client.until_idle()
