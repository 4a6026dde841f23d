"""transformers' generate() on a static batch: the baseline."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from benchmarks.engines.base import Adapter, TextScores, TokenTimes, Unsupported

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


class Generate(Adapter):
    """One generate() for all requests. Prompts of a cell must have one length; shorter outputs wait for the longest."""

    @override
    def prepare(self) -> None:
        import torch
        import transformers

        if self.settings.dtype not in DTYPES:
            raise Unsupported(f"{self.settings.dtype} weights")
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(self.settings.threads)

    @override
    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, DTYPES[self.settings.dtype])
        self._model: Any = AutoModelForCausalLM.from_pretrained(self.settings.model, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None  # generate() takes it from here where it is given None
        self.run([[1, 2, 3]], [2])

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        ids = torch.tensor(_left_padded(prompts))
        mask = torch.tensor([[0] * (ids.shape[1] - len(one)) + [1] * len(one) for one in prompts])
        config = GenerationConfig(max_new_tokens=max(outputs), do_sample=False, eos_token_id=None, pad_token_id=0)
        times = TokenTimes(len(prompts))

        def count(*_: Any, **__: Any) -> Any:
            times.add_to_all(index for index, wanted in enumerate(outputs) if len(times.times[index]) < wanted)
            return torch.zeros(len(prompts), dtype=torch.bool)

        with torch.inference_mode():
            self._model.generate(
                ids, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([count])
            )
        return times.times

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        import torch

        scores = TextScores()
        with torch.inference_mode():
            for ids in documents:
                logits = self._model(torch.tensor([ids]), use_cache=False).logits[0].float()
                scores.add_logits(logits.numpy(), ids[1:])
        return scores

    @override
    def facts(self) -> dict[str, int | float | str]:
        return {"weights_bytes": self._model.get_memory_footprint()}

    @override
    def version(self) -> str:
        import torch
        import transformers

        return f"{transformers.__version__} (torch {torch.__version__})"


def _left_padded(prompts: list[list[int]]) -> list[list[int]]:
    longest = max(map(len, prompts))
    return [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
