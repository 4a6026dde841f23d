"""DoLa against transformers 4.55.4, the last release that had it, by golden files; and whatever runs beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from factories.engine.fake_engine import engine_config, request
from factories.engine.model_engine import (
    answer_alone,
    check_any_company,
    golden_cases,
    in_any_company,
    load_tiny,
    model_engine,
)
from factories.models.checkpoints import tiny_checkpoint
from factories.models.golden_models import EOS, GOLDEN_MODELS, golden_checkpoint
from penstock.generation.core.decoding_mode import NO_GUIDANCE, GuidanceOptions
from penstock.generation.core.request import Request
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.hidden_keeper import HiddenKeeper
from penstock.generation.options.mode_options import candidate_layers
from penstock.generation.runner.dola import contrasted
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, SuppressTokensLogitsProcessor

CASES = golden_cases("dola", {"dola_layers", "max_new_tokens", "repetition_penalty"})
PROMPT = [17, 203, 44, 9, 118, 60, 7]
LAYERS = 6


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CausalLM]:
    root = tmp_path_factory.mktemp("golden")
    return {name: load_tiny(golden_checkpoint(root / name, name)) for name in {case["model"] for case in CASES}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama", seed=6, num_hidden_layers=LAYERS)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_ids_are_those_of_the_last_release_that_had_it(golden: Mapping[str, CausalLM], case: Mapping[str, Any]) -> None:
    config, kwargs = GOLDEN_MODELS[case["model"]].config, dict(case["kwargs"])
    layers = candidate_layers(
        kwargs.pop("dola_layers"), config["num_hidden_layers"], tied=config["tie_word_embeddings"]
    )
    item = request(case["prompt"], mode=DolaOptions(layers), eos_token_ids=(EOS,), **kwargs)
    assert answer_alone(golden[case["model"]], item).ids == dict(enumerate(case["ids"]))


def test_there_are_golden_cases_of_both_presets_and_of_single_layers() -> None:
    layers = [case["kwargs"]["dola_layers"] for case in CASES]
    assert "low" in layers
    assert "high" in layers
    assert any(isinstance(one, list) and len(one) == 1 for one in layers)


def expected_scores(reference: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """Contrasted scores of every position, written down row by row from the paper's definition and the release's
    details: no norm before an early exit, means over the vocabulary, a tenth of the highest probability."""
    with torch.no_grad():
        out = reference(torch.tensor([ids]), output_hidden_states=True)
        early = {layer: reference.lm_head(out.hidden_states[layer])[0].log_softmax(-1) for layer in layers}
    rows = []
    for position, logits in enumerate(out.logits[0]):
        final = logits.log_softmax(-1)
        distances = []
        for layer in layers:
            base = early[layer][position]
            mean = 0.5 * (final.exp() + base.exp())
            parts = [F.kl_div(one, mean, reduction="none").mean() for one in (final, base)]
            distances.append(float(sum(parts)))
        base = early[layers[distances.index(max(distances))]][position]
        scores = final - base
        scores[final < final.max() + math.log(0.1)] = -math.inf
        rows.append(scores)
    return torch.stack(rows)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layers", [(0,), (1, 3), (0, 2, 4), (4, 1, 5, 0)])
@pytest.mark.parametrize("scale", [None, 1.8])
def test_sampled_logprobs_are_those_of_the_contrasted_distribution(
    model: CausalLM, reference: PreTrainedModel, layers: tuple[int, ...], scale: float | None
) -> None:
    guidance = NO_GUIDANCE if scale is None else GuidanceOptions(scale, (5, 6))
    item = request(
        PROMPT, max_new_tokens=12, do_sample=True, seed=3, num_return_sequences=3, top_logprobs=0,
        mode=DolaOptions(layers), guidance=guidance,
    )  # fmt: skip
    answer = answer_alone(model, item)
    for index, ids in answer.ids.items():
        scores = expected_scores(reference, PROMPT + ids, layers)[len(PROMPT) - 1 : -1]
        if scale is not None:
            with torch.no_grad():
                free = reference(torch.tensor([[5, 6, *ids]])).logits[0, 1:-1].log_softmax(-1)
            scores = scale * (scores.log_softmax(-1) - free) + free
        expected = [float(row[one]) for row, one in zip(scores.log_softmax(-1), ids, strict=True)]
        entries = [entry for delta in answer.deltas if delta.index == index for entry in delta.logprobs]
        assert [entry.chosen.logprob for entry in entries if entry.chosen] == pytest.approx(expected, abs=1e-4)


def test_where_a_grammar_may_allow_none_but_unlikely_tokens_these_come_last_by_the_models_order() -> None:
    generator = torch.Generator().manual_seed(1)
    final_RV = torch.randn(3, 40, generator=generator) * 4
    early_LRV = torch.randn(2, 3, 40, generator=generator) * 4
    plain_RV, behind_RV = contrasted(final_RV, early_LRV, []), contrasted(final_RV, early_LRV, [1])
    assert torch.equal(behind_RV[[0, 2]], plain_RV[[0, 2]])
    is_out_V = plain_RV[1].isinf()
    assert is_out_V.any()
    assert torch.equal(behind_RV[1][~is_out_V], plain_RV[1][~is_out_V])
    assert behind_RV[1][is_out_V].max() < behind_RV[1][~is_out_V].min()
    assert torch.equal(behind_RV[1][is_out_V].argsort(), final_RV[1][is_out_V].argsort())


def requests() -> list[Request]:
    common: dict[str, Any] = {"max_new_tokens": 14, "eos_token_ids": (EOS,)}
    return [
        request(PROMPT, request_id="greedy", mode=DolaOptions((0, 2, 4)), repetition_penalty=1.2, **common),
        request(PROMPT * 2, request_id="other layers", mode=DolaOptions((3,)), **common),
        request(PROMPT, request_id="n", mode=DolaOptions((0, 2, 4)), do_sample=True, num_return_sequences=3, **common),
        request([3], request_id="guided", mode=DolaOptions((1, 5)), guidance=GuidanceOptions(1.5, (8, 9)), **common),
        request(PROMPT * 3, request_id="plain", **common),
    ]


@in_any_company
def test_the_same_ids_alone_and_in_any_company(model: CausalLM, config: EngineConfig) -> None:
    assert check_any_company(model, requests, config).stats.prefix_hit_tokens > 0


def test_resumed_ids_go_on_where_they_were(model: CausalLM) -> None:
    spec: dict[str, Any] = {"max_new_tokens": 10, "mode": DolaOptions((0, 2)), "do_sample": True, "seed": 8}
    ids = answer_alone(model, request(PROMPT, **spec)).ids[0]
    assert answer_alone(model, request(PROMPT, resumed_token_ids=[ids[:4]], **spec)).ids == {0: ids[4:]}


def test_only_rows_and_layers_of_dola_draws_are_kept(model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []
    take = HiddenKeeper.take

    def watch(self: HiddenKeeper, layer: int, hidden_TI: torch.Tensor) -> None:
        take(self, layer, hidden_TI)
        if layer in self.states:
            taken.append((layer, len(self.states[layer])))

    monkeypatch.setattr(HiddenKeeper, "take", watch)
    engine = model_engine(model, engine_config())
    for item in (request(PROMPT), request(PROMPT), request(PROMPT[1:], mode=DolaOptions((1, 4)))):
        engine.add(item)
    engine.step()
    assert taken == [(1, 1), (4, 1)]
    taken.clear()
    other = model_engine(model, engine_config())
    other.add(request(PROMPT))
    other.step()
    assert taken == []


def test_early_exits_that_are_no_numbers_end_their_request_alone(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = HiddenKeeper.take

    def broken(self: HiddenKeeper, layer: int, hidden_TI: torch.Tensor) -> None:
        take(self, layer, hidden_TI)
        if layer in self.states:
            self.states[layer] = self.states[layer] * float("nan")

    monkeypatch.setattr(HiddenKeeper, "take", broken)
    engine = model_engine(model)
    plain, item = request(PROMPT), request(PROMPT, mode=DolaOptions((1, 4)))
    engine.add(plain)
    engine.add(item)
    outputs = {output.request.request_id: output for output in engine.step()}
    error = outputs[item.request_id].finished
    assert error is not None
    assert error.error is not None
    assert error.error.reason == "MODEL_OUTPUT_NAN"
    assert outputs[plain.request_id].finished is None


@pytest.mark.parametrize("scale", [-1.0, 0.0, 2.0])
def test_guidance_leaves_out_what_the_filter_leaves_out(model: CausalLM, scale: float) -> None:
    layers = DolaOptions((0, 2))
    item = request([5, 6, 7, 8], max_new_tokens=5, mode=layers, guidance=GuidanceOptions(scale, (9, 10)))
    answer = answer_alone(model, item)
    assert answer.finished is not None
    assert answer.finished.error is None
    assert len(answer.ids[0]) == 5


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 5, "top_logprobs": 2}], ids=["greedy", "sampled"])
def test_where_the_processors_leave_nothing_of_the_contrast_it_goes_on_with_id_0_as_transformers(
    model: CausalLM, reference: PreTrainedModel, sampling: dict[str, Any]
) -> None:
    layers, length = (0, 2, 4), 8
    left = expected_scores(reference, PROMPT, layers)[-1].isfinite().nonzero()[:, 0].tolist()
    processors = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1), SuppressTokensLogitsProcessor(left)])
    ids = list(PROMPT)
    nothing = []
    for place in range(length):
        scores = processors(torch.tensor([ids]), expected_scores(reference, ids, layers)[-1:])
        nothing += [place] * bool(scores.isinf().all())
        ids.append(int(scores.argmax(-1)))
    item = request(
        PROMPT, mode=DolaOptions(layers), max_new_tokens=length, no_repeat_ngram_size=1, suppress_tokens=tuple(left),
        **sampling,
    )  # fmt: skip
    answer = answer_alone(model, item)
    assert answer.finished is not None
    assert answer.finished.error is None
    assert len(answer.ids[0]) == length
    assert answer.ids[0][0] == 0
    assert nothing[0] == 0
    if sampling:
        entry = next(entry for delta in answer.deltas for entry in delta.logprobs)
        assert entry.chosen is not None
        assert (entry.chosen.token_id, entry.chosen.logprob, entry.top) == (0, -math.inf, ())
    else:
        assert answer.ids[0] == ids[len(PROMPT) :]


def test_what_may_be_drawn_is_never_left_for_id_0(model: CausalLM) -> None:
    item = request(
        PROMPT, mode=DolaOptions((0, 2)), max_new_tokens=4, allowed_token_trie=((40, 41),), suppress_tokens=(41,),
        eos_token_ids=(EOS,),
    )  # fmt: skip
    answer = answer_alone(model, item)
    assert answer.finished is not None
    assert answer.finished.error is not None
    assert answer.finished.error.reason == "NO_TOKEN_LEFT"
