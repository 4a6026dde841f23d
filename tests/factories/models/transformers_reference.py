"""Results of the installed transformers for the same arguments: ids, beam scores, scores of the draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)

# No token of any model, so that padding differs from answers; padded sequences are not computed further.
PADDING = 1 << 30
# Our names of options that have another name in generate(), or none.
_OURS = ("seed", "allowed_token_ids", "allowed_token_trie", "stop_token_ids", "assistant_model", "ignore_eos")


class StopOnRun(StoppingCriteria):
    """Criterion that ends a sequence on one of the runs of ids, within its new tokens."""

    def __init__(self, runs: Iterable[list[int]], prompt_tokens: int) -> None:
        self.runs = list(runs)
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        new = [row[self.prompt_tokens :] for row in input_ids.tolist()]
        return torch.tensor([any(row[-len(run) :] == run for run in self.runs) for row in new])


def to_arguments(prompt: list[int], arguments: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """Convert `arguments` (JSON's types, our names) for generate(). `extra`: assistant, tokenizer."""
    given: dict[str, Any] = {name: value for name, value in arguments.items() if name not in _OURS}
    if "sequence_bias" in given:
        given["sequence_bias"] = {tuple(ids): bias for ids, bias in given["sequence_bias"]}
    if "exponential_decay_length_penalty" in given:
        given["exponential_decay_length_penalty"] = tuple(given["exponential_decay_length_penalty"])
    if "keys" in given.get("watermarking_config", ()):
        given["watermarking_config"] = SynthIDTextWatermarkingConfig(**given["watermarking_config"])
    if "negative_prompt_ids" in given:
        given["negative_prompt_ids"] = torch.tensor([given["negative_prompt_ids"]])
    if "allowed_token_ids" in arguments or "allowed_token_trie" in arguments:
        given["prefix_allowed_tokens_fn"] = _allowed(len(prompt), arguments)
    if "stop_token_ids" in arguments:
        given["stopping_criteria"] = StoppingCriteriaList([StopOnRun(arguments["stop_token_ids"], len(prompt))])
    return given | extra


def _allowed(prompt_tokens: int, arguments: Mapping[str, Any]) -> Callable[[int, torch.Tensor], list[int]]:
    """Make the function that our declarative forms stand for."""
    if "allowed_token_ids" in arguments:
        return lambda batch, input_ids: arguments["allowed_token_ids"]

    def follow(batch: int, input_ids: torch.Tensor) -> list[int]:
        done = input_ids.tolist()[prompt_tokens:]
        paths = arguments["allowed_token_trie"]
        return [path[len(done)] for path in paths if path[: len(done)] == done and len(path) > len(done)]

    return follow


def reference_answer(
    model: PreTrainedModel, prompt: list[int], arguments: Mapping[str, Any], **extra: Any
) -> tuple[list[list[int]], list[float] | None]:
    """Generate the new ids of every returned sequence, up to its end, and the beam scores in beam modes.

    Without ids the prompt is the argument inputs_embeds.
    """
    given = {"do_sample": False, "pad_token_id": PADDING, **to_arguments(prompt, arguments, **extra)}
    with torch.no_grad():
        answer = model.generate(_inputs(prompt), return_dict_in_generate=True, output_scores=True, **given)
    new = answer.sequences[:, len(prompt) :].tolist()
    scores = getattr(answer, "sequences_scores", None)
    return [without_padding(row) for row in new], None if scores is None else scores.tolist()


def _inputs(prompt: list[int]) -> torch.Tensor | None:
    return torch.tensor([prompt]) if prompt else None


def without_padding(row: list[int]) -> list[int]:
    """Return `row` up to its end."""
    return row[: row.index(PADDING)] if PADDING in row else row


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel, contexts: list[list[int]], embeds: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute transformers' logits (N, V), float32, after each of N contexts of the same length.

    `embeds` (P, hidden): what the model reads before them.
    """
    ids_NT = torch.tensor(contexts, dtype=torch.int64)
    if embeds is None:
        return model(ids_NT).logits[:, -1].float()
    before_NPI = embeds.to(model.dtype).expand(len(contexts), *embeds.shape)
    inputs = torch.cat([before_NPI, model.get_input_embeddings()(ids_NT)], dim=1)
    return model(inputs_embeds=inputs).logits[:, -1].float()


class ReferenceScores:
    """transformers' logits processors for one request, over its logits of given ids."""

    def __init__(self, model: PreTrainedModel, prompt: list[int], arguments: Mapping[str, Any], **extra: Any) -> None:
        self._model = model
        self.num_rows: int = arguments.get("num_beams", 1)

        def grab(
            model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **rest: Any
        ) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
            return logits_processor, stopping_criteria

        given = to_arguments(prompt, arguments)
        if "stop_strings" in given:
            # generate() does not hand a tokenizer on to such a function.
            criterion = StopStringCriteria(extra["tokenizer"], given.pop("stop_strings"))
            given["stopping_criteria"] = StoppingCriteriaList([criterion, *given.get("stopping_criteria", [])])
        # Public since 4.52: generate() prepares everything as for its own modes and calls this instead.
        self._processors, self._criteria = model.generate(_inputs(prompt), custom_generate=grab, **given)

    @torch.no_grad()
    def process(self, contexts: list[list[int]], logits_NV: torch.Tensor) -> torch.Tensor:
        """Return the processed scores (N, V) of `logits_NV`; in beam modes log-probabilities are processed."""
        scores_NV = logits_NV.log_softmax(-1) if self.num_rows > 1 else logits_NV.clone()
        processed_NV: torch.Tensor = self._processors(torch.tensor(contexts), scores_NV)
        return processed_NV

    def stops(self, context: list[int]) -> bool:
        """True when a sequence with these ids, prompt first, has ended."""
        return bool(self._criteria(torch.tensor([context]), None).item())
