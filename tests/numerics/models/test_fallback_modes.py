"""A native type forced to the fallback does all that the native route does: modes, outputs, number formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from factories.engine.modes import Generated, generate, load_service
from factories.models.checkpoints import tiny_checkpoint
from factories.models.model_types import VOCAB_SIZE, reference_of, tiny_model_type
from factories.models.transformers_reference import reference_answer
from penstock.common.errors import InvalidArgument
from penstock.generation.startup.loaded_model import LoadedModel

PROMPT = [7, 91, 33, 12, 7, 91, 33, 56, 101, 14, 7, 91]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 11, "temperature": 0.8, "top_k": 30, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "no_repeat_ngram_size": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 5},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "guidance": {"guidance_scale": 1.5, "negative_prompt_ids": [5, 6]},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
    "embeddings": {"inputs_embeds": torch.randn(1, 6, 48, generator=torch.Generator().manual_seed(2)) * 0.2},
}


class Routes(NamedTuple):
    """One checkpoint by both routes."""

    native: LoadedModel
    fallback: LoadedModel


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> Routes:
    # A window shorter than the prompt, and layers enough for DoLa's candidates.
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=4, num_hidden_layers=6, **window)
    found = Routes(load_service(folder), load_service(folder, model_route="fallback"))
    assert [one.weights.model.config.route for one in found] == ["native", "fallback"]
    return found


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_gives_the_ids_of_the_native_route(routes: Routes, mode: str) -> None:
    arguments = {"max_new_tokens": 12, **MODES[mode]}
    prompt = [] if mode == "embeddings" else PROMPT
    native, fallback = (generate(one, prompt, arguments) for one in routes)
    assert fallback.ids == native.ids
    assert len(native.ids) == arguments.get("num_return_sequences", 1)


def test_tensors_are_those_of_the_native_route(routes: Routes) -> None:
    wanted = dict.fromkeys(("output_hidden_states", "output_attentions", "output_logits"), True)
    native, fallback = (_tensors(generate(one, PROMPT, {"max_new_tokens": 3, **wanted})) for one in routes)
    assert native.keys() == fallback.keys()
    for name, tensor in native.items():
        assert torch.allclose(fallback[name], tensor, rtol=1e-3, atol=1e-4), name


def _tensors(answer: Generated) -> dict[tuple[int, str], torch.Tensor]:
    found = {}
    for position, step in enumerate(one for delta in answer.answer.deltas for one in delta.tensors):
        assert step is not None
        for name in ("logits", "hidden_states", "attentions"):
            data = getattr(step, name)
            found[position, name] = torch.frombuffer(bytearray(data.data), dtype=torch.float32).view(data.shape)
    assert len(found) == 9
    return found


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_layers_are_ours(tmp_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Inputs of transformers' modules have no importance.
    monkeypatch.setattr("penstock.generation.models.registry.measure_importance", lambda *_: {})
    folder = tiny_checkpoint(tmp_path, "qwen2", seed=4, hidden_size=64, intermediate_size=128)
    native, fallback = (
        load_service(folder, model_route=route, quantization=quantization) for route in ("native", "fallback")
    )
    assert fallback.weights.model.num_bytes < load_service(folder, model_route="fallback").weights.model.num_bytes
    ids = [generate(one, PROMPT, {"max_new_tokens": 12}).ids for one in (native, fallback)]
    assert ids[0] == ids[1]


def test_a_draft_model_may_run_by_transformers_too(tmp_path: Path) -> None:
    folder, draft = (tiny_checkpoint(tmp_path / kind, kind, seed=4) for kind in ("qwen2", "llama"))
    loaded = load_service(folder, model_route="fallback", assistant_model=str(draft), assistant_kv_memory="1MiB")
    assert loaded.engine.draft is not None
    assert loaded.engine.draft.model.config.route == "fallback"
    plain = generate(loaded, PROMPT, {"max_new_tokens": 12})
    assisted = generate(loaded, PROMPT, {"max_new_tokens": 12, "assistant_model": loaded.engine.draft.name})
    assert assisted.ids == plain.ids


def test_an_int8_pool_holds_keys_and_values(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "plain", "qwen2", seed=4)
    native, fallback = (
        load_service(folder, model_route=route, kv_cache_dtype="int8") for route in ("native", "fallback")
    )
    assert fallback.pools.kv.dtype is torch.int8
    ids = [generate(one, PROMPT, {"max_new_tokens": 12}).ids for one in (native, fallback)]
    assert ids[0] == ids[1]
    # Chunks take the other way to the pool.
    loaded = load_service(tiny_model_type(tmp_path / "chunks", "llama4_text"), kv_cache_dtype="int8")
    assert len(generate(loaded, PROMPT, {"max_new_tokens": 12, "ignore_eos": True}).ids[0]) == 12


def test_beams_of_another_type_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_model_type(tmp_path, "gemma2")
    loaded = load_service(folder, model_route="fallback")
    arguments = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 16, "eos_token_id": 2}
    prompt = [token % VOCAB_SIZE for token in PROMPT]
    expected, scores = reference_answer(reference_of(folder), prompt, arguments)
    answer = generate(loaded, prompt, arguments)
    assert answer.ids == expected
    assert answer.scores == pytest.approx(scores, rel=1e-4, abs=1e-4)

    # Chunks are in no attention that could be kept.
    with pytest.raises(InvalidArgument, match="output_attentions"):
        generate(load_service(tiny_model_type(tmp_path / "chunks", "llama4_text")), prompt, {"output_attentions": True})


def test_tensors_of_a_model_with_soft_caps_are_those_of_the_native_route(tmp_path: Path) -> None:
    folder = tiny_model_type(tmp_path, "gemma2")
    prompt = [token % VOCAB_SIZE for token in PROMPT]
    wanted = dict.fromkeys(("output_hidden_states", "output_attentions", "output_logits"), True)
    arguments = {"max_new_tokens": 3, "ignore_eos": True, **wanted}
    native, fallback = (
        _tensors(generate(load_service(folder, model_route=route), prompt, arguments))
        for route in ("native", "fallback")
    )
    for name, tensor in native.items():
        assert torch.allclose(fallback[name], tensor, rtol=1e-3, atol=1e-4), name
