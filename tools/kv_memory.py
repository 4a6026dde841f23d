"""Table of KV memory: seventeen published configurations, bytes a token of a sequence of several lengths.

    python tools/kv_memory.py            # the table, as docs/guide/models.md has it

Ours is what a decoding sequence holds between two steps: whole blocks of 16 tokens, with windows as the C++ kernels
read them, from a multiple of 64 on. The least is what the next row reads. vLLM's is by the rule of its
`vllm/v1/core/kv_cache_utils.py`: groups of as many layers as the smallest kind has, or as the largest has if that is
below 1.5 times the smallest, each padded to that number, and windows in whole blocks. Keys and values are bfloat16.
Index keys are, too, but for vLLM's: bytes with a scale of four bytes a key. They and all rows that they may choose
count in the least.
`tests/data/kv_configs.json` has the numbers of the published config.json files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.cli.inspect_cache import bytes_read, context_bytes, index_key_numbers, layer_sights
from penstock.generation.attention.cache_layout import LayerSight

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "kv_configs.json"
LENGTHS = {"1 k": 1024, "32 k": 32_768, "128 k": 131_072}
_BLOCK, _TILE, _BFLOAT16 = 16, 64, 2
_CLOSE = 1.5
# Bytes of a scale in vLLM's index keys.
_SCALE = 4


class Memory(NamedTuple):
    """Bytes of one sequence."""

    ours: int
    least: int
    vllm: int


def memory_of(name: str, num_tokens: int) -> Memory:
    """Return the bytes that a sequence of a published model holds."""
    values = json.loads(CONFIGS.read_text(encoding="utf-8"))[name]
    tiled = sights_of(values)
    sights = [replace(sight, align=1) for sight in tiled]
    each = 2 * values["num_key_value_heads"] * values["head_dim"] * _BFLOAT16
    if "kv_lora_rank" in values:
        # One row for all heads.
        each = (values["kv_lora_rank"] + values["qk_rope_head_dim"]) * _BFLOAT16
    numbers, stored = index_key_numbers(values, len(sights)), -(-num_tokens // _BLOCK) * _BLOCK
    scales = _SCALE * numbers // values.get("index_head_dim", 1)
    return Memory(
        context_bytes(tiled, each, num_tokens, _BLOCK) + numbers * _BFLOAT16 * stored,
        bytes_read(sights, each, num_tokens) + numbers * _BFLOAT16 * num_tokens,
        vllm_bytes(sights, each, num_tokens) + (numbers + scales) * stored,
    )


def sights_of(values: Mapping[str, Any]) -> list[LayerSight]:
    """Return what each layer's rows read, as the C++ kernels do."""
    sights = layer_sights(values, values["num_hidden_layers"])
    return [replace(sight, align=_TILE) if sight.window else sight for sight in sights]


def index_layers_of(values: Mapping[str, Any]) -> int:
    """Return the number of layers with an indexer."""
    return index_key_numbers(values, values["num_hidden_layers"]) // values.get("index_head_dim", 1)


def vllm_bytes(sights: Sequence[LayerSight], layer_bytes: int, num_tokens: int) -> int:
    """Return the bytes of vLLM's blocks: see above."""
    counts = Counter(sights)
    size, largest = min(counts.values()), max(counts.values())
    if largest < _CLOSE * size:
        size = largest
    blocks = 0
    for sight, count in counts.items():
        first = 0
        if sight.window:
            first = max(num_tokens - sight.window, 0)
        elif sight.chunk:
            first = (num_tokens - 1) // sight.chunk * sight.chunk
        blocks += -(-count // size) * (-(-num_tokens // _BLOCK) - first // _BLOCK)
    return blocks * size * layer_bytes * _BLOCK


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| model | {' | '.join(f'{name}: ours, least, vLLM' for name in LENGTHS)} |"
    yield f"|---|{'---|' * len(LENGTHS)}"
    for name in json.loads(CONFIGS.read_text(encoding="utf-8")):
        cells = []
        for length in LENGTHS.values():
            one = memory_of(name, length)
            shown = (f"{bytes_ / length / 1024:.1f}" for bytes_ in one)
            cells.append(f"{', '.join(shown)}: {one.ours / one.least:.2f}")
        yield f"| {name.split('/')[-1]} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
