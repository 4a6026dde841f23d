"""vLLM's CPU engine in this process, a step at a time."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.engines import w8a8
from benchmarks.engines.base import Adapter, TextScores, TokenTimes, Unsupported
from benchmarks.engines.compressed import QUANTIZED_BY_US, quantised_by_us

# int8: W8A8, its weights in a checkpoint of their own; what is not a linear layer computes in bf16.
DTYPES = {"bf16": "bfloat16", "fp32": "float32", "int8": "bfloat16"}


class Vllm(Adapter):
    """LLMEngine with the prefix cache on; it compiles the model while it loads, unless --option vllm.eager=1."""

    takes_adapters = True

    @override
    def prepare(self) -> None:
        self._model = Path(self.settings.model)
        if self.settings.dtype.startswith(QUANTIZED_BY_US):
            self._model = quantised_by_us(self.settings, may_make=False)
        elif self.settings.dtype not in DTYPES:
            raise Unsupported(f"no {self.settings.dtype} weights for vLLM")
        if self.settings.dtype == "int8":
            self._model = self.settings.converted("w8a8")
            if not self._model.is_dir():
                w8a8.convert(Path(self.settings.model), self._model)
        cores = sorted(os.sched_getaffinity(0))[: self.settings.threads]
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": self.settings.options.get("kv_gib", "2"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
        }
        import vllm  # noqa: F401

    @override
    def load(self) -> None:
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=str(self._model),
            dtype=DTYPES.get(self.settings.dtype, "bfloat16"),
            max_model_len=self.settings.max_context,
            max_num_seqs=64,
            enable_prefix_caching=True,
            enforce_eager=bool(int(self.settings.options.get("eager", "0"))),
            **self._lora_arguments(),
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._ids = itertools.count()
        self.run([[1, 2, 3]], [2])

    def _lora_arguments(self) -> dict[str, Any]:
        folders = self.settings.adapters
        if not folders:
            return {}
        ranks = [json.loads((Path(folder) / "adapter_config.json").read_text())["r"] for folder in folders]
        return {"enable_lora": True, "max_loras": len(folders), "max_lora_rank": max(ranks)}

    def _lora(self, number: int) -> Any:
        """Return the adapter of a request, or None."""
        if not self.settings.adapters:
            return None
        from vllm.lora.request import LoRARequest

        place = self.adapter(number)
        return LoRARequest(str(place), place + 1, self.settings.adapters[place])

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        times = TokenTimes(len(prompts))
        index: dict[str, int] = {}
        for number, (prompt, wanted) in enumerate(zip(prompts, outputs, strict=True)):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=wanted,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            index[request_id := str(next(self._ids))] = number
            lora = self._lora(number)
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params, lora_request=lora)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                times.add(index[output.request_id], len(output.outputs[0].token_ids))
        return times.times

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        scores = TextScores()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for ids in documents:
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": ids}, params)
            found = None
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    found = output.prompt_logprobs
            # Of the first token nothing is known.
            for token, place in zip(ids[1:], found[1:] if found else (), strict=True):
                scores.log_probabilities.append(place[token].logprob)
                scores.likeliest.append(next(name for name, one in place.items() if one.rank == 1))
        return scores

    @override
    def version(self) -> str:
        import torch
        import vllm

        return f"{vllm.__version__} (torch {torch.__version__})"
