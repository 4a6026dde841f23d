"""Memory that a model takes, told before any of it is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from factories.models.checkpoints import tiny_checkpoint
from penstock.common.errors import DoesNotFit
from penstock.common.progress import show_nothing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.models.registry import read_model_config
from penstock.generation.startup.load import load
from penstock.generation.startup.memory_check import check_least_kv, check_weights
from penstock.generation.weights.tensor_names import tensor_shapes


def test_a_pool_without_room_for_a_block_is_refused_before_the_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    for path in folder.glob("*.safetensors"):
        # Whoever reads it fails.
        path.write_bytes(b"")
    config = GenerationServiceConfig(model=str(folder), kv_memory="1KiB", kernels="torch")
    with pytest.raises(DoesNotFit, match=r"holds no KV block: one takes .* whole context .* give it that") as caught:
        load(config, "tiny", show_nothing)
    assert caught.value.flag == "--kv-memory"


def test_the_least_of_a_pool_counts_layers_heads_and_their_ranks(tmp_path: Path) -> None:
    model = replace(read_model_config(tiny_checkpoint(tmp_path)), num_layers=4, num_kv_heads=2, head_dim=8)
    model = replace(model, sliding_windows=(None,) * 4)
    block = 4 * 2 * 16 * 2 * 8 * 2

    def check(memory: int, *, item_bytes: int = 2, parts: int = 1) -> None:
        check_least_kv(model, memory, block_size=16, item_bytes=item_bytes, parts=parts, context=100)

    check(block)
    with pytest.raises(DoesNotFit, match=r"one takes 4 KiB .* \(100 tokens\) 28 KiB"):
        check(block - 1)
    check(block // 2, item_bytes=1)
    check(block // 2, parts=2)
    # Layers with windows share blocks: only the pool itself knows how many.
    model = replace(model, sliding_windows=(None, 8, 8, 8))
    check(block // 4)


def test_layers_with_states_have_no_part_of_a_block(tmp_path: Path) -> None:
    model = read_model_config(tiny_checkpoint(tmp_path, "qwen3_5_text"))
    assert 0 < model.num_kv_layers < model.num_layers
    block = model.num_kv_layers * 2 * 16 * model.num_kv_heads * model.head_dim * 2
    check_least_kv(model, block, block_size=16, item_bytes=2, parts=1, context=100)
    with pytest.raises(DoesNotFit):
        check_least_kv(model, block - 1, block_size=16, item_bytes=2, parts=1, context=100)


def test_compact_weights_may_take_less_than_their_files_and_one_matrix_besides(tmp_path: Path) -> None:
    model = replace(read_model_config(tiny_checkpoint(tmp_path)), num_layers=400)
    numbers = sum(math.prod(shape) for shape in tensor_shapes(model).values())
    stored = 2 * numbers
    most = max(math.prod(shape) for shape in tensor_shapes(model).values())
    with pytest.raises(DoesNotFit, match="choose a smaller MODEL"):
        check_weights(stored, model, "none", int(0.9 * stored))
    check_weights(stored, model, "none", int(0.9 * stored), compact=True)
    # Of the bits of each number 12.1 of 16 are left; gate and up lie whole for a moment.
    with pytest.raises(DoesNotFit):
        check_weights(stored, model, "none", int(12.1 / 16 * stored) + 2 * most, compact=True)
    # A head is a matrix of its own.
    untied = replace(model, tie_word_embeddings=False, vocab_size=10**6, num_layers=1)
    table, rest = 2 * 10**6 * model.hidden_size, 10**6
    check_weights(2 * table + rest, untied, "none", int(2.8 * table) + rest, compact=True)
    # Others are not compact.
    check_weights(stored, model, "int8", int(0.7 * stored), compact=True)
    with pytest.raises(DoesNotFit):
        check_weights(stored, model, "int8", int(0.4 * stored), compact=True)
