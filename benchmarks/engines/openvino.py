"""OpenVINO GenAI's continuous batching on the CPU plugin; the checkpoint exported by optimum-intel."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from benchmarks.engines.base import Adapter, Settings, TokenTimes

PRECISIONS = {"bf16": "bf16", "fp32": "f32", "int8": "bf16", "int4": "bf16"}
GIB = 1 << 30


def export(settings: Settings, out: Path) -> None:
    """The checkpoint as OpenVINO's IR: 16-bit weights, or 8- or 4-bit ones with scales (nncf's weight compression)."""
    from optimum.exporters.openvino import main_export
    from optimum.intel.openvino import OVConfig

    bits: dict[str, dict[str, Any]] = {"int8": {"bits": 8}, "int4": {"bits": 4, "sym": False, "group_size": 128}}
    if settings.dtype in bits:
        config = OVConfig(quantization_config=bits[settings.dtype])
    else:
        config = OVConfig(dtype="fp32" if settings.dtype == "fp32" else "fp16")
    unfinished = out.with_name(out.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    main_export(settings.model, unfinished, task="text-generation-with-past", ov_config=config, convert_tokenizer=False)
    unfinished.rename(out)


class OpenVino(Adapter):
    """ContinuousBatchingPipeline, a step at a time; token ids in and out, the prefix cache on."""

    def prepare(self) -> None:
        """See Adapter."""
        import openvino
        import openvino_genai

        self._tensor, self._genai = openvino.Tensor, openvino_genai
        self._folder = self.settings.converted("openvino-" + self.settings.dtype.replace("bf16", "fp16"))
        if not self._folder.is_dir():
            export(self.settings, self._folder)

    def load(self) -> None:
        """See Adapter."""
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

    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        """See Adapter."""
        import numpy

        times = TokenTimes(len(prompts))
        handles = []
        for prompt, wanted in zip(prompts, outputs, strict=True):
            config = self._genai.GenerationConfig()
            config.max_new_tokens = wanted
            config.ignore_eos = True
            config.set_eos_token_id(0)  # it refuses a model that has none
            config.do_sample = False
            ids = self._tensor(numpy.array([prompt], dtype=numpy.int64))
            handles.append(self._pipe.add_request(next(self._ids), ids, config))
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        times.add(index, len(output.generated_ids))
        return times.times

    def version(self) -> str:
        """See Adapter."""
        return f"OpenVINO GenAI {self._genai.__version__}"
