"""Models by transformers' own modules give the ids of its generate(), alone and in a full, mixed engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import engine_config, request, run
from factories.engine.model_engine import model_engine
from factories.models.model_types import FURTHER, OLD, SEEING, USUAL, check_ids, tiny_model_type
from factories.models.run_kernels import KERNELS, cpu_device
from penstock.generation.attention.base import AttentionMetadata
from penstock.generation.attention.kv_shape import KVShape
from penstock.generation.core.model_config import ModelRoute
from penstock.generation.models import transformers_loading
from penstock.generation.models.registry import load_model
from penstock.generation.models.transformers_fallback import TransformersModel

FALLBACK = ModelRoute("fallback")


def check(folder: Path, model_type: str) -> None:
    torch.set_num_threads(1)
    tiny_model_type(folder, model_type)
    check_ids(folder, load_model(folder, dtype="float32", device=cpu_device(), route=FALLBACK))


@pytest.mark.thinned(8)
@pytest.mark.parametrize("model_type", USUAL)
def test_a_model_type_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is not supported"),
        ("gpt_oss", {"swiglu_limit": 1.5}, "swiglu_limit other than 7.0"),
    ],
)
def test_a_native_type_with_a_foreign_field_gives_the_ids_of_generate(
    tmp_path: Path, model_type: str, fields: dict[str, Any], reason: str
) -> None:
    torch.set_num_threads(1)
    tiny_model_type(tmp_path, model_type, **fields)
    model = load_model(tmp_path, dtype="float32", device=cpu_device())
    assert model.config.route == "fallback"
    assert reason in model.config.route_reason
    check_ids(tmp_path, model, new_tokens=24)


@pytest.mark.skipif(KERNELS != "native", reason="torch's general operators read a step's lengths on the host")
@pytest.mark.parametrize(
    "model_type",
    # Plain; experts, of a form of its own; a module that attends by itself; states; a cutoff by a distribution.
    ["stablelm", "granitemoe", "gpt2", "jetmoe", "falcon", "mamba2", "gemma3n_text"],
)
def test_later_steps_of_few_rows_run_without_the_modules(tmp_path: Path, model_type: str) -> None:
    torch.set_num_threads(1)
    model = load_model(tiny_model_type(tmp_path, model_type), dtype="float32", device=cpu_device(), route=FALLBACK)
    assert isinstance(model, TransformersModel)
    passes: list[int] = []
    model.causal.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    # In turns: the passes go through the modules before there is a graph.
    engine = model_engine(model, engine_config(num_blocks=40, block_size=4))
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]
    first = [
        run(engine, request(prompt, request_id="0", max_new_tokens=16, eos_token_ids=()))["0"].ids for prompt in prompts
    ]
    before = len(passes)
    again = run(
        engine,
        *(
            request(prompt, request_id=str(number), max_new_tokens=16, eos_token_ids=())
            for number, prompt in enumerate(prompts)
        ),
    )
    assert [again[str(number)].ids for number in range(len(prompts))] == first
    # New numbers of rows are compared once; prompts of models with states are passes of their own.
    assert len(passes) - before <= 5


@pytest.mark.skipif(KERNELS != "native", reason="torch's general operators read a step's lengths on the host")
def test_scales_that_begin_at_a_position_hold_for_each_row_of_a_recorded_pass(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"layer_types": ["full_attention"] * 4, "no_rope_layers": [0] * 4}
    folder = tiny_model_type(tmp_path, "llama4_text", **fields, floor_scale=64, attn_scale=0.8)
    model = load_model(folder, dtype="float32", device=cpu_device(), route=FALLBACK)
    assert isinstance(model, TransformersModel)
    kv, wanted = (KVShape.of(model.config, model.dtype, 16).pool(20, model.device) for _ in range(2))
    tables = torch.arange(20, dtype=torch.int32).unsqueeze(0)
    # A pass of one row is recorded; passes of three rows below position 64 cannot tell what it holds.
    for length, count in [*((length, 1) for length in range(1, 20)), (22, 3), (25, 3), (64, 3), (65, 3)]:
        metadata, positions_T = AttentionMetadata.build([count], [length], tables, 16, model.device)
        ids_T = torch.arange(3, 3 + count)
        found = model.forward(ids_T, positions_T, metadata, kv)
        with torch.inference_mode():
            assert torch.equal(found, model._by_modules(ids_T, positions_T, metadata, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FURTHER)
def test_further_types_give_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=[] if place == 0 else pytest.mark.slow) for place, one in enumerate(SEEING)]
)
def test_the_text_part_of_a_model_that_also_sees_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)


@pytest.mark.parametrize(
    "model_type", [pytest.param(one, marks=[] if place < 2 else pytest.mark.slow) for place, one in enumerate(OLD)]
)
def test_an_old_type_gives_the_ids_of_generate(tmp_path: Path, model_type: str) -> None:
    check(tmp_path, model_type)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        {"alibi": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
        {"multi_query": False},
    ],
)
def test_each_kind_of_falcon_gives_the_ids_of_generate(tmp_path: Path, fields: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # By seed 0 two ids are equally likely.
    tiny_model_type(tmp_path, "falcon", seed=1, **fields)
    check_ids(tmp_path, load_model(tmp_path, dtype="float32", device=cpu_device()), new_tokens=24)


def test_every_type_whose_text_part_is_served_is_checked() -> None:
    assert set(SEEING) == transformers_loading._SEEING
