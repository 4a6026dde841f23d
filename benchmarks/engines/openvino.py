"""OpenVINO GenAI's continuous batching on the CPU plugin; the checkpoint exported by optimum-intel."""

from __future__ import annotations

import itertools
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.engines.base import Adapter, Settings, TextScores, TokenTimes

PRECISIONS = {"bf16": "bf16", "fp32": "f32", "int8": "bf16", "int4": "bf16"}
GIB = 1 << 30


def export(settings: Settings, out: Path) -> None:
    """The checkpoint as OpenVINO's IR with 32- or 16-bit weights."""
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino import OVConfig

    config = OVConfig(dtype="fp32" if settings.dtype == "fp32" else "fp16")
    main_export(settings.model, out, task="text-generation-with-past", ov_config=config, convert_tokenizer=False)


def compress(source: Path, out: Path, bits: int) -> None:
    """The IR in `source` with 8- or 4-bit weights, by nncf (optimum silently left them as they were)."""
    import nncf
    import openvino

    model = openvino.Core().read_model(source / "openvino_model.xml")
    options = {8: {}, 4: {"group_size": 128}}[bits]
    mode = nncf.CompressWeightsMode.INT8_ASYM if bits == 8 else nncf.CompressWeightsMode.INT4_ASYM
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("openvino_model.*"))
    openvino.save_model(nncf.compress_weights(model, mode=mode, **options), out / "openvino_model.xml")


def converted(settings: Settings) -> Path:
    """The folder of the IR in the number format that is asked for, made on first use."""
    bits = {"int8": 8, "int4": 4}.get(settings.dtype)
    plain = settings.converted("openvino-fp32" if settings.dtype == "fp32" else "openvino-fp16")
    folder = settings.converted(f"openvino-nncf-int{bits}") if bits else plain
    for wanted, make in ((plain, partial(export, settings)), (folder, lambda out: compress(plain, out, bits or 8))):
        if not wanted.is_dir():
            unfinished = wanted.with_name(wanted.name + ".part")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(wanted)
    return folder


class OpenVino(Adapter):
    """ContinuousBatchingPipeline, a step at a time; token ids in and out, the prefix cache on."""

    @override
    def prepare(self) -> None:
        import openvino
        import openvino_genai

        self._tensor, self._genai = openvino.Tensor, openvino_genai
        self._folder = converted(self.settings)

    @override
    def load(self) -> None:
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = int(self.settings.options.get("kv_gib", "2"))
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        if "max_num_batched_tokens" in self.settings.options:
            scheduler.max_num_batched_tokens = int(self.settings.options["max_num_batched_tokens"])
        properties = {
            "INFERENCE_NUM_THREADS": self.settings.threads,
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.settings.dtype],
        }
        self._pipe: Any = self._genai.ContinuousBatchingPipeline(str(self._folder), scheduler, "CPU", properties)
        self._ids = itertools.count()
        self.run([[1, 2, 3]], [2])

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        times = TokenTimes(len(prompts))
        handles = [
            self._pipe.add_request(next(self._ids), self._prompt(prompt), self._config(wanted))
            for prompt, wanted in zip(prompts, outputs, strict=True)
        ]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        times.add(index, len(output.generated_ids))
        return times.times

    def _prompt(self, ids: list[int]) -> Any:
        import numpy

        return self._tensor(numpy.array([ids], dtype=numpy.int64))

    def _config(self, wanted: int) -> Any:
        """Options of a greedy answer of `wanted` tokens."""
        config = self._genai.GenerationConfig()
        config.max_new_tokens = wanted
        config.ignore_eos = True
        config.set_eos_token_id(0)  # it refuses a model that has none
        config.do_sample = False
        return config

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        """The prompt's log-probabilities, which an answer has beside its own when it repeats the prompt. Which id is
        likeliest is not told."""
        scores = TextScores()
        for ids in documents:
            config = self._config(1)
            config.echo, config.logprobs = True, 1
            handle = self._pipe.add_request(next(self._ids), self._prompt(ids), config)
            while self._pipe.has_non_finished_requests():
                self._pipe.step()
            (output,) = handle.read_all()
            if list(output.generated_ids)[: len(ids)] != ids:
                raise RuntimeError("the answer does not begin with its prompt")
            # The first token has nothing before it.
            scores.log_probabilities.extend(output.generated_log_probs[1 : len(ids)])
        return scores

    @override
    def version(self) -> str:
        return f"OpenVINO GenAI {self._genai.__version__}"
