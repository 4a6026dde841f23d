"""The engine on an int8 KV pool: the same ids however requests are batched, and close to the model's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import ROOMY, load_tiny, model_engine
from factories.engine.modes import generate, load_service
from factories.models.checkpoints import tiny_checkpoint
from factories.models.kernels import Layer, Shape, contexts
from factories.models.native import use_native
from penstock.common.checkpoint import demo_folder
from penstock.generation.attention.attention_keeper import AttentionKeeper, KeptRow
from penstock.generation.attention.sdpa import SDPAAttention
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.engine.config import EngineConfig
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.startup.tune_engine import window_of

INT8 = torch.int8


@pytest.fixture(scope="module", params=["torch", "torch, window", "native", "native, window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Load a model: in float32 on torch's operators; in bfloat16 on the kernels, which round alike in every batch."""
    folder = tmp_path_factory.mktemp("model")
    window = {"sliding_window": 6} if "window" in request.param else {}
    tiny_checkpoint(folder, "mistral" if window else "qwen2", seed=5, **window)
    if "torch" in request.param:
        return load_tiny(folder)
    use_native()
    device = CPUDevice()
    device.instruction_set = torch.ops.penstock.instruction_set("")
    return load_model(folder, dtype="bfloat16", device=device)


def crowd() -> list[dict[str, Any]]:
    """Equal beginnings, several sequences of one prompt, greedy and sampled."""
    return [
        {"prompt": [*range(10, 20), i], "max_new_tokens": 12, "num_return_sequences": 1 + 2 * (i % 2), "seed": i}
        | ({"do_sample": True, "temperature": 1.5} if i % 2 else {})
        for i in range(7)
    ]


def together(model: CausalLM, config: EngineConfig) -> tuple[list[Any], Any]:
    """Ids of everyone in the crowd, one joining after another."""
    engine = model_engine(model, config, INT8)
    items = [request(**spec) for spec in crowd()]
    answers = run(engine, *items[:3])
    answers |= run(engine, *items[3:])
    assert engine.load().kv_blocks_used == 0
    engine.check_integrity()
    return [answers[item.request_id].ids for item in items], engine.stats


def test_same_ids_alone_batched_chunked_preempted_and_prefix_hit(model: CausalLM) -> None:
    alone = []
    for spec in crowd():
        item = request(**spec)
        alone.append(run(model_engine(model, ROOMY, INT8), item)[item.request_id].ids)
    # Fewer where blocks that left the window are given back.
    blocks = 24 if window_of(model) else 34
    tight = engine_config(
        num_blocks=blocks, block_size=2, max_running_sequences=8, max_batch_tokens=12, prefix_cache=True
    )
    ids, stats = together(model, tight)
    assert ids == alone
    assert min(stats.preemptions, stats.prefix_hit_tokens, stats.copy_on_write_blocks) > 0, stats


def test_beams_contrastive_search_and_drafts_give_what_they_give_in_a_pool_of_the_models_dtype() -> None:
    """The demo model's answers have margins that a step of int8 does not turn."""
    demo = demo_folder()
    prompt = [*range(300, 340)]
    modes: list[dict[str, Any]] = [
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": "demo"},
        {"guidance_scale": 1.5},
    ]
    own = load_service(demo, assistant_model=str(demo), assistant_kv_memory="4MiB")
    int8 = load_service(demo, assistant_model=str(demo), assistant_kv_memory="4MiB", kv_cache_dtype="int8")
    assert int8.pools.kv.dtype is int8.engine.draft.kv.dtype is INT8  # type: ignore[union-attr]
    for mode in modes:
        if "assistant_model" in mode:
            mode = {"assistant_model": int8.served.assistant_model}
        arguments = {"max_new_tokens": 16, **mode}
        assert generate(int8, prompt, arguments).ids == generate(own, prompt, arguments).ids, mode


def test_attention_weights_are_those_of_what_the_pool_holds() -> None:
    shape = Shape(kv_heads=2, group=3, head_dim=16, block_size=4, window=None)
    sequences = contexts(shape, [21], torch.float32, 0)
    weights = []
    for kv_dtype in (torch.float32, INT8):
        keeper = AttentionKeeper(SDPAAttention(), [KeptRow(row=20, index=0, context=21)])
        Layer(keeper, shape, kv_dtype, 8, 0).run(sequences, [[]])
        weights.append(keeper.weights(0))
    assert weights[0].shape == (1, 6, 21)
    assert not torch.equal(*weights)
    torch.testing.assert_close(weights[1], weights[0], atol=0.01, rtol=0)
