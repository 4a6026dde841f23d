"""Steps on a device of its own kind: no tensor of the CPU among its tensors, few waits for it, and the CPU's ids.

Where there is a GPU it is that, else a pretended one, which computes on the CPU and refuses what a GPU refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from factories.engine.fake_engine import Answer, collect, engine_config, request, run
from factories.models.checkpoints import tiny_checkpoint
from factories.models.emulated_cuda import EmulatedGraphs, int_mm
from factories.models.pretended_gpu import DEVICE, PretendedCUDA, PretendedGPU
from penstock.generation.attention.kv_cache import KVCachePool
from penstock.generation.core.decoding_mode import GuidanceOptions, TensorOutputs
from penstock.generation.core.request import Request
from penstock.generation.devices.base import Device
from penstock.generation.devices.cpu import CPUDevice
from penstock.generation.devices.cuda import CUDADevice
from penstock.generation.engine.decoding.assisted import AssistanceOptions
from penstock.generation.engine.decoding.beam_options import BeamOptions
from penstock.generation.engine.decoding.contrastive import ContrastiveOptions
from penstock.generation.engine.decoding.parallel_sampling import DolaOptions
from penstock.generation.engine.engine import Engine
from penstock.generation.models.decoder import CausalLM
from penstock.generation.models.registry import load_model
from penstock.generation.runner.model_runner import ModelRunner

HAS_GPU = torch.cuda.is_available()
# A GPU's attention takes blocks of 256 tokens; the general operators any.
CONFIG = engine_config(num_blocks=120, max_batch_tokens=64)
# The ids, and flags among them, are read back together.
ONE_READ = ["copy to the host"]


class Place:
    """The CPU, or the other device."""

    def __init__(self, device: Device, gpu: PretendedGPU | None = None) -> None:
        device.start(num_threads=1, kernels="torch")
        self.device = device
        self._gpu = gpu

    def entered(self) -> AbstractContextManager[object]:
        """Context in which its tensors compute."""
        return nullcontext() if self._gpu is None else self._gpu.entered()

    def engine(
        self, model: CausalLM, graphs: EmulatedGraphs | None = None, kv_dtype: torch.dtype | None = None
    ) -> Engine:
        """An engine on a pool of its own."""
        facts = model.config
        geometry = (facts.num_layers, CONFIG.num_blocks, CONFIG.block_size, facts.num_kv_heads, facts.head_dim)
        pool = KVCachePool(*geometry, kv_dtype or model.dtype, self.device.torch_device, has_scrap=True)
        kernels = self.device.sampling_kernels()
        runner = ModelRunner(model, pool, kernels=kernels, graphs=graphs, most_captured_rows=8)
        return Engine(CONFIG, runner, None)

    def ids(self, model: CausalLM, make: Callable[[], list[Request]], **options: Any) -> dict[str, Any]:
        """The answers to requests of which one joins a step."""
        with self.entered():
            engine = self.engine(model, **options)
            answers: dict[str, Answer] = {}
            for item in make():
                engine.add(item)
                collect(answers, engine.step())
            run(engine, answers=answers)
        return {name: answer.ids for name, answer in answers.items()}


@pytest.fixture(scope="module")
def here() -> Place:
    torch.set_num_threads(1)
    return Place(CPUDevice())


@pytest.fixture(scope="module")
def gpu() -> PretendedGPU:
    return PretendedGPU()


@pytest.fixture(scope="module")
def there(gpu: PretendedGPU) -> Place:
    return Place(CUDADevice()) if HAS_GPU else Place(PretendedCUDA(), gpu)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., CausalLM]:
    """(place, family, quantization) -> the same model there, loaded once."""

    @cache
    def folder(family: str) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("model"), family)

    @cache
    def loaded(place: Place, family: str = "qwen2", quantization: str = "none") -> CausalLM:
        with place.entered():
            model = load_model(folder(family), dtype="float32", quantization=quantization, device=place.device)
        assert isinstance(model, CausalLM)
        return model

    return loaded


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top_k": {"do_sample": True, "top_k": 9},
    "top_p": {"do_sample": True, "top_p": 0.8},
    "flat": {"do_sample": True, "temperature": 3.0},
    "min_p": {"do_sample": True, "min_p": 0.05},
    "typical": {"do_sample": True, "typical_p": 0.8},
    "eta": {"do_sample": True, "eta_cutoff": 0.01},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.001},
    "top_h": {"do_sample": True, "top_h": 0.4},
    "several": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "logprobs": {"do_sample": True, "top_logprobs": 3},
    "greedy logprobs": {"top_logprobs": 3, "prompt_logprobs": 2},
    "repetition": {"repetition_penalty": 1.4},
    "openai": {"frequency_penalty": 0.7, "presence_penalty": 0.3},
    "ngrams": {"no_repeat_ngram_size": 2},
    "bias": {"logit_bias": {3: 4.0, 9: -2.0}},
    "suppressed": {"suppress_tokens": (4, 5), "min_new_tokens": 3, "eos_token_ids": (7,)},
    "sequence bias": {"sequence_bias": {(3, 4): 5.0, (7,): 1.0}, "bad_words_ids": ((8,), (9, 3))},
    "allowed": {"allowed_token_ids": frozenset((3, 4, 5, 6, 40))},
    "trie": {"allowed_token_trie": ((3, 4, 5, 6), (3, 9, 9)), "eos_token_ids": (7,)},
    "decay": {"exponential_decay_length_penalty": (2, 1.5), "eos_token_ids": (7,)},
    "beams": {"mode": BeamOptions(3)},
    "sampled beams": {"mode": BeamOptions(3), "do_sample": True, "top_k": 12},
    "contrastive": {"mode": ContrastiveOptions(0.6, 2)},
    "dola": {"mode": DolaOptions((0,))},
    "prompt lookup": {"mode": AssistanceOptions(prompt_lookup_num_tokens=3)},
    "lookahead": {"mode": AssistanceOptions(lookahead_window=3, lookahead_ngram_size=3)},
    "guidance": {"guidance": GuidanceOptions(1.5, (9,))},
    "tensors": {"tensors": TensorOutputs(logits=True, scores=True, hidden_states=True, attentions=True)},
}


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", OPTIONS)
def test_ids_are_the_cpus_beside_a_plain_request(
    load: Callable[..., CausalLM], here: Place, there: Place, name: str
) -> None:
    def make() -> list[Request]:
        asked = request([1, 2, 3, 1, 2], request_id="asked", seed=5, max_new_tokens=7, **OPTIONS[name])
        return [asked, request([4, 5], request_id="plain", max_new_tokens=9)]

    graphs = None if HAS_GPU else EmulatedGraphs()
    assert there.ids(load(there), make, graphs=graphs) == here.ids(load(here), make)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "qwen2_moe", "cohere2", "olmo2"]
)
def test_families_give_the_cpus_ids(load: Callable[..., CausalLM], here: Place, there: Place, family: str) -> None:
    def make() -> list[Request]:
        return [request([4 + number, 5], request_id=str(number), max_new_tokens=6) for number in range(3)]

    graphs = None if HAS_GPU else EmulatedGraphs()
    assert there.ids(load(there, family), make, graphs=graphs) == here.ids(load(here, family), make)


def test_an_int8_pool_gives_the_cpus_ids(load: Callable[..., CausalLM], here: Place, there: Place) -> None:
    def make() -> list[Request]:
        return [request([4 + number, 5], request_id=str(number), max_new_tokens=9) for number in range(3)]

    found = there.ids(load(there), make, kv_dtype=torch.int8)
    assert found == here.ids(load(here), make, kv_dtype=torch.int8)


# Of int4 and fp8 the sums differ by a rounding to bfloat16: that they run on the device is all that is asked.
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_quantised_weights_run_there(
    load: Callable[..., CausalLM], here: Place, there: Place, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        # torch's own saturates on a CPU without VNNI.
        monkeypatch.setattr(torch, "_int_mm", int_mm)

    def make() -> list[Request]:
        return [request([4, 5], request_id="one", max_new_tokens=6)]

    graphs = None if HAS_GPU else EmulatedGraphs()
    found = there.ids(load(there, "qwen2", quantization), make, graphs=graphs)
    assert len(found["one"][0]) == 6
    if quantization == "int8":
        assert found == here.ids(load(here, "qwen2", quantization), make)


# Options by which a request's steps need no more than their ids.
@pytest.mark.skipif(HAS_GPU, reason="a GPU counts no waits")
@pytest.mark.parametrize(
    "name", ["greedy", "top_k", "repetition", "openai", "ngrams", "bias", "suppressed", "sequence bias"]
)
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.thinned(3)
def test_a_decode_step_waits_once(
    load: Callable[..., CausalLM], there: Place, gpu: PretendedGPU, name: str, captured: bool
) -> None:
    with gpu.entered():
        engine = there.engine(load(there), EmulatedGraphs() if captured else None)
        for number in range(3):
            options = OPTIONS[name] if number else {}
            engine.add(request([number, 5], request_id=str(number), max_new_tokens=30, **options))
        for _ in range(5):
            engine.step()
        waits = []
        for _ in range(12):
            with gpu.counting() as found:
                engine.step()
            waits.append(found)
    assert waits == [ONE_READ] * 12


@pytest.mark.skipif(HAS_GPU, reason="it is a GPU")
def test_the_pretended_device_refuses_what_a_gpu_refuses(gpu: PretendedGPU) -> None:
    with gpu.entered():
        tensor = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
            tensor + torch.ones(3)
        with gpu.counting() as waits:
            assert float((tensor + 1).sum()) == 6
            tensor[tensor > 2]
            torch.ones(3).to(DEVICE)
            torch.tensor([1, 2], device=DEVICE)
        assert len(waits) == 4
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(AssertionError, match="outside of"):
        tensor + 1
