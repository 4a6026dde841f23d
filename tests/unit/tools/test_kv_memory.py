"""KV memory of published models is what their layers read, within a few per cent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from factories.engine.sequences import params, sequence
from penstock.cli.inspect_cache import layer_sights
from penstock.generation.attention.cache_layout import layout_of
from penstock.generation.attention.index_keys import IndexRows
from penstock.generation.attention.kv_cache import kv_bytes_per_block
from penstock.generation.engine.block_pool import BlockPool
from penstock.generation.engine.block_tables import BlockTables, FoundPrefix

from tools.kv_memory import CONFIGS, LENGTHS, index_layers_of, memory_of, sights_of, table

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


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_holds_what_the_table_says(name: str) -> None:
    values = json.loads(CONFIGS.read_text(encoding="utf-8"))[name]
    layout, is_latent, size = layout_of(sights_of(values)), "kv_lora_rank" in values, 16
    index = IndexRows(index_layers_of(values), values.get("index_head_dim", 0), torch.bfloat16)
    # The bytes of a block as the pool allocates them.
    block_bytes = kv_bytes_per_block(
        layout.layers_a_block,
        size,
        1 if is_latent else values["num_key_value_heads"],
        values["kv_lora_rank"] + values["qk_rope_head_dim"] if is_latent else values["head_dim"],
        torch.bfloat16,
        has_values=not is_latent,
        index=index,
    )
    lengths = [length + more for length in LENGTHS.values() for more in (0, 1, 17, 63)]
    pool = BlockPool(lengths[-1] // size * layout.bundle_blocks + 99, size, [one.num_blocks for one in layout.groups])
    tables = BlockTables(pool, prefix_cache=False, groups=layout.groups, rows=size)
    item = sequence([1], params())
    tables.start([(item, FoundPrefix(tuple([] for _ in layout.groups)))])
    for length in lengths:
        while item.num_computed_tokens < length:
            # One token a step where the blocks are counted, and a block of them on the way.
            step = min(size, max(length - 1 - item.num_computed_tokens, 1))
            item.token_ids += [1] * step
            tables.make_writable(item, item.num_computed_tokens + step)
            item.num_computed_tokens += step
            tables.release_behind(item)
        assert (pool.num_blocks - pool.num_free) * block_bytes == memory_of(name, length).ours


def test_kinds_of_layers_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for values in json.loads(CONFIGS.read_text(encoding="utf-8")).values():
        count = values["num_hidden_layers"]
        known = CONFIG_MAPPING[values["model_type"]](**values).to_dict()
        assert layer_sights(values, count) == layer_sights({**values, "layer_types": known.get("layer_types")}, count)


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4_unified_text"])
@pytest.mark.parametrize("count", [5, 6, 7, 35])
def test_the_last_layer_of_gemma_4_reads_everything(model_type: str, count: int) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {"model_type": model_type, "num_hidden_layers": count, "sliding_window": 512}
    known = CONFIG_MAPPING[model_type](num_hidden_layers=count).to_dict()
    assert layer_sights(values, count) == layer_sights({**values, "layer_types": known["layer_types"]}, count)


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8")
