"""Names of transformers' continuous batching on Generator, and SynthID's Bayesian detector."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.local_generators import local_generator
from factories.servers.generation import text_checkpoint
from penstock import Generator
from penstock.common.errors import InvalidArgument
from penstock.generator.bayesian_detector import posterior, read_detector, synthid_options
from transformers import (
    BayesianDetectorConfig,
    BayesianDetectorModel,
    SynthIDTextWatermarkDetector,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
)

PROMPTS = [[5, 6, 7], [9, 10], [30, 31, 32, 33]]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "ignore_eos": True}


def test_generate_batch_gives_results_by_request(generator: Generator) -> None:
    wanted = [one.token_ids for one in generator.generate(PROMPTS, **GREEDY)]
    found = generator.generate_batch(PROMPTS, **GREEDY)
    assert [*found] == ["req_0", "req_1", "req_2"]
    assert [one.generated_tokens for one in found.values()] == wanted
    assert [one.prompt_ids for one in found.values()] == PROMPTS
    assert all(one.is_finished() and one.error is None and one.status.name == "FINISHED" for one in found.values())
    assert generator.generate_batch([]) == {}
    several = generator.generate_batch(PROMPTS[:1], num_beams=2, num_return_sequences=2, **GREEDY)
    assert [*several] == ["req_0__child#0", "req_0"]
    failed = generator.generate_batch([[5], [10**6]], **GREEDY)
    assert [one.status.name for one in failed.values()] == ["FINISHED", "FAILED"]
    assert "prompt" in (failed["req_1"].error or "")


def test_a_manager_takes_requests_and_gives_results_as_they_come(generator: Generator) -> None:
    wanted = [one.token_ids for one in generator.generate(PROMPTS, **GREEDY)]
    with generator.continuous_batching_context_manager(do_sample=False, ignore_eos=True) as manager:
        names = manager.add_requests(PROMPTS, max_new_tokens=6)
        found = {one.request_id: one for one in manager}
        assert [found[name].generated_tokens for name in names] == wanted
        name = manager.add_request(PROMPTS[0], "mine", max_new_tokens=6, streaming=True, record_timestamps=True)
        streamed = [*manager.request_id_iter(name)]
        assert [len(one.generated_tokens) for one in streamed] == [1, 2, 3, 4, 5, 6, 6]
        assert [one.is_finished() for one in streamed] == [False] * 6 + [True]
        assert len(streamed[-1].timestamps or []) == 6
        assert manager.is_running()
        endless = manager.add_request(PROMPTS[0], max_new_tokens=4000)
        manager.cancel_request(endless)
        assert len(next(manager.request_id_iter(endless)).generated_tokens) < 4000
    assert not manager.is_running()
    with pytest.raises(ValueError, match="is stopped"):
        manager.add_request([5])


async def test_a_handler_gets_the_results_of_its_request(generator: Generator) -> None:
    manager = generator.init_continuous_batching(do_sample=False, ignore_eos=True)
    done = asyncio.get_running_loop().create_future()
    manager.register_result_handler("one", done.set_result)
    manager.add_request(PROMPTS[0], "one", max_new_tokens=3)
    result = await done
    assert len(result.generated_tokens) == 3
    assert manager.get_result(timeout=0.0) is None
    manager.stop()


def test_results_of_one_request_do_not_wait_for_those_of_others(generator: Generator) -> None:
    manager = generator.init_continuous_batching(**GREEDY)
    first, second = manager.add_requests(PROMPTS[:2])
    manager.join()
    # They wait in the queue; nothing can come of a request that never was.
    assert list(manager.request_id_iter("another")) == []
    assert manager.get_result("another") is None
    results = [manager.get_result(second), manager.get_result(), manager.get_result(timeout=0.0)]
    assert [one and one.request_id for one in results] == [second, first, None]


def test_a_request_runs_until_its_last_result_is_there(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = generator.init_continuous_batching(**GREEDY)
    give, were_running = manager._give, list[bool]()

    def watched(output: Any) -> None:
        were_running.append(output.request_id in manager._streams)
        give(output)

    monkeypatch.setattr(manager, "_give", watched)
    name = manager.add_request(PROMPTS[0])
    assert [one.is_finished() for one in manager.request_id_iter(name)] == [True]
    assert were_running == [True]


def test_a_handler_whose_loop_is_closed_loses_no_result(generator: Generator) -> None:
    manager = generator.init_continuous_batching(**GREEDY)

    async def register() -> None:
        manager.register_result_handler("one", lambda _: None)

    asyncio.run(register())
    manager.add_request(PROMPTS[0], "one")
    manager.add_request(PROMPTS[1], "two")
    assert {one.request_id: len(one.generated_tokens) for one in manager} == {"one": 6, "two": 6}


def test_whatever_a_request_ends_with_is_its_result(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("no such thing")

    monkeypatch.setattr("penstock.generator.continuous_batching._with_delta", broken)
    manager = generator.init_continuous_batching(**GREEDY)
    manager.add_requests(PROMPTS)
    assert [(one.status.name, one.error) for one in manager] == [("FAILED", "no such thing")] * 3


def test_threads_are_no_more_than_requests_in_the_engine(tmp_path: Path) -> None:
    with local_generator(text_checkpoint(tmp_path), max_in_flight=2) as made:
        manager = made.init_continuous_batching(**GREEDY)
        names = manager.add_requests(PROMPTS * 6)
        assert sum(one.name == "continuous-batching" for one in threading.enumerate()) <= 2
        assert sorted(one.request_id for one in manager) == sorted(names)


def test_wrong_arguments_are_named(generator: Generator) -> None:
    manager = generator.init_continuous_batching(**GREEDY)
    for wrong in ("hello", 5, [1.5], [None]):
        with pytest.raises(InvalidArgument, match="input_ids: must be a list of ids"):
            manager.add_request(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'max_lengt'"):
        manager.add_request([5], "again", max_lengt=3)
    # One that was refused is not live.
    assert list(manager) == []
    assert manager.add_request([5], "again") == "again"
    assert len([*manager]) == 1
    for detector in (None, 5, object()):
        with pytest.raises(InvalidArgument, match="detector: must be a BayesianDetectorModel or its folder"):
            generator.detect_watermark([1] * 9, detector=detector)


def test_the_bayesian_detector_is_transformers(generator: Generator, tmp_path: Path) -> None:
    torch.manual_seed(4)
    keys = [654, 400, 836, 123, 340, 443, 597, 160]
    config = BayesianDetectorConfig(watermarking_depth=len(keys))
    model = BayesianDetectorModel(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn_like(one))
    watermark = SynthIDTextWatermarkingConfig(ngram_len=5, keys=keys, context_history_size=64)
    model.config.set_detector_information("a model", watermark.to_dict())
    processor = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=5, keys=keys, context_history_size=64, sampling_table_size=2**16, sampling_table_seed=0, device="cpu"
    )

    class Tokenizer:
        eos_token_id = 2

    theirs = SynthIDTextWatermarkDetector(model, processor, Tokenizer())
    cases = [torch.randint(3, 300, (length,)).tolist() for length in (5, 9, 40, 120)]
    cases += [[7, 8, 9] * 20, [*range(3, 40), 2, *range(3, 20)]]
    options = synthid_options(None, model)
    for ids in cases:
        wanted = theirs(torch.tensor([ids]))
        assert posterior(model, options, ids, [2]) == pytest.approx(
            float(torch.as_tensor(wanted[0]).flatten()[0]), abs=1e-6
        )
    model.save_pretrained(tmp_path)
    ends = list(generator._engine.loaded.files.defaults.eos_token_ids)
    found = generator.detect_watermark(cases[2], detector=tmp_path, watermarking_config=watermark)
    assert found == pytest.approx(posterior(read_detector(tmp_path), options, cases[2], ends), abs=1e-6)
    with pytest.raises(InvalidArgument, match="token_ids: must be more than 4"):
        generator.detect_watermark([1, 2, 3, 4], detector=model)
    with pytest.raises(ValueError, match=r"detector: .* holds no"):
        generator.detect_watermark([1] * 9, detector=tmp_path / "nothing")
