"""llama.cpp through llama-cpp-python's low-level calls: parallel sequences in one batch, as its server forms them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from benchmarks.engines.base import Adapter, TextScores, TokenTimes
from benchmarks.engines.gguf_files import gguf_file_of

# Tokens of one llama_decode; it splits them into its own steps of 512.
BATCH, CONTEXT_STEP = 2048, 256
# Tokens of a text that are read at once: of each all logits are kept.
SCORED_ROWS = 128


@dataclass(slots=True)
class _Sequence:
    prompt: list[int]
    wanted: int
    computed: int = 0
    # Drawn and not computed yet.
    last: int | None = None
    produced: int = 0


class LlamaCpp(Adapter):
    """Each step takes a token of every sequence that decodes, and fills up with prompts in order of arrival."""

    @override
    def prepare(self) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._file = gguf_file_of(self.settings)

    @override
    def load(self) -> None:
        api = self._api
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(self._file).encode(), api.llama_model_default_params())
        if not self._model:
            raise RuntimeError("llama.cpp did not load the model")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self.run([[1, 2, 3]], [2])

    def _context(self, prompts: list[list[int]], outputs: list[int]) -> Any:
        """A context of a cell's own, so that no sequence has more room than it needs: attention looks at all of it."""
        longest = max(len(prompt) + output for prompt, output in zip(prompts, outputs, strict=True))
        params = self._api.llama_context_default_params()
        params.n_seq_max = len(prompts)
        params.n_ctx = -(-longest // CONTEXT_STEP) * CONTEXT_STEP * len(prompts)
        params.n_batch = BATCH
        params.kv_unified = bool(int(self.settings.options.get("kv_unified", "0")))
        params.n_threads = params.n_threads_batch = self.settings.threads
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        return context

    @override
    def run(self, prompts: list[list[int]], outputs: list[int]) -> list[list[float]]:
        """Making and freeing the context is not counted."""
        context = self._context(prompts, outputs)
        batch = self._api.llama_batch_init(BATCH, 0, 1)
        sequences = [_Sequence(prompt, wanted) for prompt, wanted in zip(prompts, outputs, strict=True)]
        times = TokenTimes(len(prompts))
        try:
            while any(one.produced < one.wanted for one in sequences):
                drawing = self._fill(batch, sequences)
                if self._api.llama_decode(context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
                for index, row in drawing.items():
                    sequences[index].last = self._highest(context, row)
                    sequences[index].produced += 1
                times.add_to_all(drawing)
        finally:
            self._api.llama_batch_free(batch)
            self._api.llama_free(context)
        return times.times

    @override
    def score(self, documents: list[list[int]]) -> TextScores:
        scores = TextScores()
        batch = self._api.llama_batch_init(SCORED_ROWS, 0, 1)
        try:
            for ids in documents:
                self._score_document(batch, ids, scores)
        finally:
            self._api.llama_batch_free(batch)
        return scores

    def _score_document(self, batch: Any, ids: list[int], scores: TextScores) -> None:
        import numpy

        context = self._context([ids], [0])
        try:
            for start in range(0, len(ids), SCORED_ROWS):
                batch.n_tokens = 0
                for position, token in enumerate(ids[start : start + SCORED_ROWS], start):
                    self._add(batch, token, position, 0, draws=True)
                if self._api.llama_decode(context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
                size = batch.n_tokens * self._vocab_size
                address = ctypes.cast(self._api.llama_get_logits(context), ctypes.POINTER(ctypes.c_float * size))
                logits = numpy.frombuffer(address.contents, dtype=numpy.float32).reshape(-1, self._vocab_size)
                scores.add_logits(logits, ids[start + 1 : start + 1 + len(logits)])
        finally:
            self._api.llama_free(context)

    def _fill(self, batch: Any, sequences: list[_Sequence]) -> dict[int, int]:
        """The next step; the row that each sequence's next token is drawn from."""
        drawing: dict[int, int] = {}
        batch.n_tokens = 0
        for index, one in enumerate(sequences):
            if one.last is not None and one.produced < one.wanted:
                drawing[index] = self._add(batch, one.last, one.computed, index, draws=True)
                one.computed += 1
        for index, one in enumerate(sequences):
            for position in range(one.computed, min(len(one.prompt), one.computed + BATCH - batch.n_tokens)):
                last = position == len(one.prompt) - 1
                row = self._add(batch, one.prompt[position], position, index, draws=last)
                one.computed += 1
                if last:
                    drawing[index] = row
        return drawing

    @staticmethod
    def _add(batch: Any, token: int, position: int, sequence: int, *, draws: bool) -> int:
        row: int = batch.n_tokens
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.logits[row] = draws
        batch.n_tokens = row + 1
        return row

    def _highest(self, context: Any, row: int) -> int:
        """Greedy by numpy, which is faster than llama.cpp's sampler."""
        import numpy

        logits = self._api.llama_get_logits_ith(context, row)
        values = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * self._vocab_size)).contents
        return int(numpy.frombuffer(values, dtype=numpy.float32).argmax())

    @override
    def version(self) -> str:
        return f"llama-cpp-python {self._api.__version__}"

    @override
    def facts(self) -> dict[str, int | float | str]:
        return {"weights_bytes": self._api.llama_model_size(self._model)}

    @override
    def close(self) -> None:
        self._api.llama_model_free(self._model)
