"""`penstock.Generator`: Hugging Face's generate(), continuously batched, in the caller's process, without a server."""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from penstock_client._options import check_options
from penstock_client._types import Completion, Embeddings, Scores

from penstock.common.config import ServerConfig
from penstock.common.environment import current_environment, prepare_environment
from penstock.common.errors import FailedPrecondition, InvalidArgument
from penstock.common.logging import configure_quiet_logging, get_logger
from penstock.common.options import load as load_options
from penstock.common.options import options_of
from penstock.common.progress import ShowProgress, show_nothing
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.engine.decoding.assisted import CALLERS_DRAFTS
from penstock.generation.parallel.launched_rank import run_rank
from penstock.generator.argument_names import ids_of
from penstock.generator.argument_names import reading as _reading
from penstock.generator.call_arguments import CallArguments, GenerateArguments, check_streamed, take_apart
from penstock.generator.ordered_batch import BatchFailed, OrderedBatch
from penstock.generator.prefix_handle import PrefixHandle
from penstock.generator.progress_bar import BatchReport, ShowBatch

if TYPE_CHECKING:
    import torch

    from penstock.generator.continuous_batching import ContinuousBatchingManager, GenerationOutput
    from penstock.generator.local_engine import LocalEngine
    from penstock.generator.requests import ChatExtras, LocalRequest, PromptInput
    from penstock.generator.stream import TextStream
    from penstock.generator.text import LocalTokenizer

_log = get_logger("penstock.generator")
_PROMPT = "a text, a list of ids, a list of messages, or a list of any of these"
_TEXT_OR_IDS = "a text or a list of ids"
_ONE_PROMPT = "a text, a list of ids, or a list of messages"


class Generator:
    """A model, its tokenizer and its engine in this process. Thread-safe; close it, or use it as a context.

    Requests of all threads are batched together. Results are those of the Python client, ids those of the service:
    it stands on the same engine, options and checks. Every method blocks its caller alone, also where an event loop
    runs, as in a notebook; the engine has threads of its own. Errors are PenstockErrors that name the option.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_in_flight: int | None = None,
        allow_control_tokens_in_text: bool = False,
        show: ShowProgress = show_nothing,
        **options: Any,
    ) -> None:
        """Load `model`: a folder or hub id, or None for the embedded one.

        `options` are those of `penstock serve generation` by their fields' names (kv_memory="2GiB", threads=4), which
        PENSTOCK_* variables set, too. `max_in_flight`: most requests in the engine at once, others wait (default: twice
        max_running_sequences). `allow_control_tokens_in_text`: prompts may spell control tokens, as in transformers.
        `show` gets the progress of loading.

        Raises TypeError for an unknown option, StartupError naming what to change.
        """
        prepare_environment()
        configure_quiet_logging()
        config = _config(model, options)
        if (code := run_rank(config)) is not None:
            # The program is the same for all of a launcher's processes: what follows is for rank 0.
            sys.exit(code)
        self._start(config, max_in_flight, show, allow_control_tokens_in_text)

    def _start(
        self, config: GenerationServiceConfig, max_in_flight: int | None, show: ShowProgress, allow_control_tokens: bool
    ) -> None:
        # Imports torch.
        from penstock.common.checkpoint import model_name
        from penstock.generator.local_engine import LocalEngine
        from penstock.generator.own_drafts import DraftMaker
        from penstock.generator.requests import RequestMaker
        from penstock.generator.text import LocalTokenizer

        self.name = (*config.served_model_name, model_name(config.model))[0]
        self._engine: LocalEngine = LocalEngine(config, self.name, max_in_flight, show)
        self._engine.start()
        # Also at the interpreter's end, and where nobody closed it.
        self._finalizer = weakref.finalize(self, self._engine.close)
        try:
            bundle = self._engine.load_tokenizer()
            self._tokenizer: LocalTokenizer | None = (
                None if bundle is None else LocalTokenizer(bundle, allow_control_tokens=allow_control_tokens)
            )
        except BaseException:
            self.close()
            raise
        loaded = self._engine.loaded
        self._requests = RequestMaker(self._tokenizer, loaded.files.defaults.bos_token_id)
        self._drafts = DraftMaker(self._tokenizer, loaded.served.vocab_size)

    # Text.

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        generation_config: Any = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | ShowBatch | None = None,
        return_errors: Literal[False] = False,
        **options: Unpack[GenerateArguments],
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Iterable[str] | Iterable[Sequence[int]] | Iterable[Sequence[Mapping[str, Any]]],
        generation_config: Any = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | ShowBatch | None = None,
        return_errors: bool = False,
        **options: Unpack[GenerateArguments],
    ) -> list[Any]: ...

    def generate(
        self,
        prompt: Any = "",
        generation_config: Any = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | ShowBatch | None = None,
        return_errors: bool = False,
        **options: Any,
    ) -> Any:
        """Answer a prompt (a text, ids, or a list of messages), or a list of any of these: a Completion each, in order.

        `generation_config` is transformers' GenerationConfig or a mapping; `options` are keywords by the same names and
        go before it, or arguments of transformers' generate(): `generate(**tokenizer(text, return_tensors="pt"))`,
        processors, criteria, a streamer, prefix_allowed_tokens_fn and a draft model as objects. Tools, documents and
        template variables are for messages. Several prompts: all of them run to their ends, whatever becomes of others,
        under a bar (`progress`: True, False, a function, or None: a bar on a terminal); then BatchFailed tells those
        that failed, and has the results of the others. With `return_errors` the list has their exceptions in place.
        """
        from penstock.generator.requests import is_batch

        asked = self._options(generation_config, options, (tools, documents, chat_template_kwargs), prompt)
        prompt = asked.call.prompt
        with _reading("prompt", _PROMPT):
            prompts = [*prompt] if is_batch(prompt) else None
        if prompts is None:
            return self._one(prompt, asked)
        if asked.call.streamer is not None:
            check_streamed(asked.request, len(prompts))
            return [self._one(one, asked) for one in prompts]
        if asked.request.get("request_id") or asked.request.get("inputs_embeds") is not None:
            raise ValueError("request_id and inputs_embeds are for one prompt")
        answers = list(self._many(prompts, asked, progress, len(prompts)))
        errors = {index: one for index, one in enumerate(answers) if isinstance(one, Exception)}
        if errors and not return_errors:
            raise BatchFailed([None if index in errors else one for index, one in enumerate(answers)], errors)
        return answers

    def generate_many(
        self,
        prompts: Iterable[Any],
        generation_config: Any = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | ShowBatch | None = None,
        **options: Unpack[GenerateArguments],
    ) -> Iterator[Completion | Exception]:
        """Yield the answer to each prompt, in order: a Completion, or the exception that it ended with.

        `prompts` may be an iterator of any length: it is read as the engine has room, and memory stays bounded. Leaving
        the loop aborts what is in the engine.
        """
        asked = self._options(generation_config, options, (tools, documents, chat_template_kwargs))
        _refuse_streamer(asked, "follows one prompt after the other, use generate")
        total = len(prompts) if isinstance(prompts, Sequence) else None
        return self._many(prompts, asked, progress, total)

    def generate_each(
        self, requests: Iterable[tuple[Any, Mapping[str, Any]]]
    ) -> Iterator[tuple[int, Completion | Exception]]:
        """Yield (index, answer) of each (prompt, options), as they end: in any order, each with options of its own.

        Otherwise as `generate_many`, without a bar. A wrong option is its prompt's answer, a TypeError or ValueError.
        """

        def begin(request: tuple[Any, Mapping[str, Any]]) -> tuple[Future[None], Callable[[], Completion]]:
            prompt, options = request
            asked = self._options(None, options, ((), (), None))
            _refuse_streamer(asked, "follows one prompt after the other, use generate")
            return self._begin(prompt, asked)

        batch: OrderedBatch[Completion] = OrderedBatch(requests, begin, self._engine.max_in_flight, lambda _: None)
        return batch.ended()

    def stream(
        self,
        prompt: Any = "",
        generation_config: Any = None,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateArguments],
    ) -> TextStream:
        """Answer one prompt as `generate` does, delta by delta. Closing the stream aborts the request."""
        asked = self._options(generation_config, options, (tools, documents, chat_template_kwargs), prompt)
        if asked.call.num_best is not None:
            raise ValueError("option 'best_of': needs whole answers, use generate")
        _refuse_streamer(asked, "a stream is read instead")
        return self._begin_stream(self._local(_single(asked.call.prompt), asked))

    # transformers' names.

    def generate_batch(
        self,
        inputs: Iterable[Sequence[int]],
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **options: Any,
    ) -> Mapping[str, GenerationOutput]:
        """Answer prompts of ids as transformers' `generate_batch`: {request id: result}, in order; one that fails has
        its error there. Settings of its scheduler have no effect: the Generator's count."""
        from penstock.generator.continuous_batching import batch_outputs

        prompts = [list(one) for one in inputs]
        if not prompts:
            return {}
        answers = self.generate(prompts, generation_config, progress=progress_bar, return_errors=True, **options)
        return batch_outputs(prompts, answers)

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, **options: Any
    ) -> ContinuousBatchingManager:
        """Return a manager that takes requests one by one and gives results as they come."""
        from penstock.generator.continuous_batching import ContinuousBatchingManager

        return ContinuousBatchingManager(self, generation_config, **options)

    def continuous_batching_context_manager(
        self, generation_config: Any = None, continuous_batching_config: Any = None, **options: Any
    ) -> ContinuousBatchingManager:
        """Return `init_continuous_batching`'s manager, for a `with` block; the end of the block waits for what runs.
        Settings of transformers' scheduler (block, timeout, warmup …) have no effect."""
        for name in ("block", "timeout", "persistent_manager", "warmup", "workload_hints"):
            options.pop(name, None)
        return self.init_continuous_batching(generation_config, **options)

    def detect_watermark(self, token_ids: Sequence[int], *, detector: Any, watermarking_config: Any = None) -> float:
        """Return the probability that an output carries SynthID's watermark, by a trained BayesianDetectorModel.

        `detector` is transformers' model, or its folder; `watermarking_config` by default the one that it was trained
        for. Raises ValueError, and InvalidArgument for a text that is too short.
        """
        from penstock.generator.bayesian_detector import posterior, read_detector, synthid_options

        model = read_detector(detector)
        ends = self._engine.loaded.files.defaults.eos_token_ids
        return posterior(model, synthid_options(watermarking_config, model), [int(one) for one in token_ids], ends)

    def compute_transition_scores(self, answer: Completion, *, normalize_logits: bool = False) -> list[list[float]]:
        """Return the score of each token of each choice, as transformers does: of an answer with output_scores=True."""
        return [choice.transition_scores(normalize_logits=normalize_logits) for choice in answer.choices]

    def score(
        self,
        items: Iterable[tuple[str | Sequence[int], str | Sequence[int]]],
        *,
        top_logprobs: int | None = None,
        progress: bool | ShowBatch | None = False,
    ) -> Scores:
        """Return log-probabilities of continuations: `items` are (prompt, continuation), texts or ids each.

        Raises InvalidArgument naming `items[i]`.
        """
        from penstock.generation.options.score_embed_commands import ScoreCommand, ScoreItem
        from penstock.generator.answer_reader import scores_of_items

        made = []
        with _reading("items", "pairs (prompt, continuation), each a text or a list of ids"):
            pairs = [(prompt, continuation) for prompt, continuation in items]
        for index, (prompt, continuation) in enumerate(pairs):
            with _naming(f"items[{index}]"):
                made.append(ScoreItem(*self._divided(prompt, continuation)))
        core = self._engine.core
        limits = core.limits
        most = max(1, limits.max_prompt_logprob_entries // ((top_logprobs or 0) + 1))
        results: list[Any] = []
        with BatchReport(progress, len(made)) as report:
            for begin, part in _parts(made, limits.max_score_items, most, lambda item: len(item.continuation)):
                command = ScoreCommand(list(part), top_logprobs=top_logprobs)
                with _shifted("items", begin):
                    results += self._engine.call(core.score(command, None))
                for item in part:
                    report.ended(len(item.continuation), failed=False)
        return scores_of_items(results, self._tokenizer)

    def embed(self, texts: str | Iterable[str | Sequence[int]], *, normalize: bool = False) -> Embeddings:
        """Return the mean of the final hidden states of each text or ids; of length 1 when `normalize`.

        Raises InvalidArgument naming `inputs[i]`.
        """
        from penstock.generation.options.score_embed_commands import MAX_EMBEDDING_BYTES, EmbedCommand
        from penstock.generator.answer_reader import embeddings_of_items

        with _reading("texts", "a text, or a list of texts and of lists of ids"):
            given = [texts] if isinstance(texts, str) else list(texts)
            inputs = [self._tokens(one) if isinstance(one, str) else ids_of(one) for one in given]
        core = self._engine.core
        fitting = MAX_EMBEDDING_BYTES // (4 * core.loaded.weights.model.config.hidden_size)
        results: list[Any] = []
        for begin, part in _parts(inputs, min(core.limits.max_embed_inputs, fitting), None, len):
            with _shifted("inputs", begin):
                results += self._engine.call(core.embed(EmbedCommand(list(part), normalize=normalize), None))
        return embeddings_of_items(results, normalize=normalize)

    @property
    def tokenizer(self) -> LocalTokenizer | None:
        """Tokenizer and chat template; None where it is not loaded."""
        return self._tokenizer

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt and answer together."""
        return self._engine.loaded.served.max_context_tokens

    def clear_cache(self) -> int:
        """Forget every computed prefix that no running request holds; return the number of blocks that are free."""
        return self._engine.call(self._engine.core.clear_cache())

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a PEFT folder as the adapter that requests name as `adapter`. Raises PenstockError saying what is wrong
        with name, folder or room."""
        self._engine.loaded.weights.adapters.load(name, Path(path))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that have it go on to their end. Raises NotFound."""
        self._engine.loaded.weights.adapters.unload(name)

    def write_weights(self, tensors: Mapping[str, torch.Tensor], model: str = "") -> int:
        """Put new tensors in place of the model's own, between two steps, and return the weights' version from now on.

        `tensors` by their names in the checkpoint, such as some of a model's `state_dict()`; others stay as they are.
        Those that run as one product go together: q, k and v of a layer, gate and up. All are used from one step on,
        or, where this raises, none: FailedPrecondition WEIGHTS_FIXED where the model takes none, InvalidArgument naming
        the tensor. Live requests go on; `finished` of an answer has `first_weights_version` and `last_weights_version`.
        `model` may name the draft model: its weights change nothing but the drafts, and the version stays.
        """
        from penstock.generation.weights.new_tensors import NewTensors

        given = NewTensors({name: tensor.detach() for name, tensor in tensors.items()})
        return self._engine.call(self._engine.write_weights(given, model))

    # Life.

    def close(self) -> None:
        """End live requests, and the engine with its threads. Calling it again is harmless."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<penstock.Generator of {self.name}{'' if self._finalizer.alive else ', closed'}>"

    def _options(
        self, config: Any, options: Mapping[str, Any], extras: tuple[Any, Any, Any], prompt: Any = ""
    ) -> _Asked:
        from penstock.generator.requests import ChatExtras, keyword_options

        defaults = self._engine.loaded.files.defaults
        call = take_apart(
            prompt,
            keyword_options(config, options),
            pad_token_id=defaults.pad_token_id,
            eos_token_ids=defaults.eos_token_ids,
        )
        # A folder that is no draft model of the server's is the caller's.
        assistant = call.assistant
        named = call.options.get("assistant_model")
        if isinstance(named, str) and named != self._engine.loaded.served.assistant_model and Path(named).is_dir():
            assistant = named
        if assistant is not None:
            call.options["assistant_model"] = CALLERS_DRAFTS
        # Wrong ones are told before anything runs, and not once a prompt.
        check_options(**call.options)
        tools, documents, variables = extras
        return _Asked(call, ChatExtras(list(tools), list(documents), variables), assistant)

    def _local(self, prompt: PromptInput, asked: _Asked, row: int = 0) -> LocalRequest:
        local = self._requests.make(prompt, asked.request, asked.extras)
        call = asked.call
        local.own, local.warnings = call.of_row(row), call.warnings
        if call.num_best is not None:
            local.names = {"config.num_return_sequences": "best_of"}
        if asked.assistant is not None:
            # Its keys and values are those of one request.
            local.own = local.own._replace(drafts=self._drafts.make(asked.assistant, call.assistant_tokenizer))
        if call.prefix is not None:
            call.prefix.check(local.message.prompt_token_ids)
        return local

    def _one(self, prompt: PromptInput, asked: _Asked) -> Completion:
        """Return the answer to one prompt, which a streamer may follow."""
        streamer = asked.call.streamer
        if streamer is not None:
            check_streamed(asked.request, 1)
        local = self._local(prompt, asked)
        stream = self._begin_stream(local)
        if streamer is None:
            return asked.chosen(stream.result())
        import torch

        with stream:
            streamer.put(torch.tensor([list(local.message.prompt_token_ids)], dtype=torch.int64))
            for delta in stream:
                for token_id in delta.token_ids:
                    streamer.put(torch.tensor([token_id], dtype=torch.int64))
            streamer.end()
            return stream.result()

    def hold_prefix(self, prompt: PromptInput, **options: Any) -> PrefixHandle:
        """Compute a prompt, and hold its keys and values until the handle is closed: `past_key_values` of generate().

        Prompts that begin with its ids do not compute its whole blocks again, however full the pool is. `options` are
        those that name the prompt's tenant or template (cache_salt, add_generation_prompt). Raises FailedPrecondition:
        BUSY while requests are live, NO_PREFIX_CACHE.
        """
        asked = self._options(
            None, {**options, "max_new_tokens": 1, "do_sample": False, "ignore_eos": True}, ((), (), None), prompt
        )
        local = self._local(_single(asked.call.prompt), asked)
        ids, salt = list(local.message.prompt_token_ids), local.message.cache_salt
        self._begin_stream(local).result()
        blocks, held = self._engine.on_engine(lambda engine: engine.caller_blocks.hold_prefix(ids, salt))
        return PrefixHandle(ids, held, partial(_release_prefix, weakref.ref(self._engine), blocks))

    def _begin_stream(self, local: LocalRequest) -> TextStream:
        from penstock.generator.answer_reader import AnswerReader
        from penstock.generator.stream import TextStream

        return TextStream(self._engine, local, AnswerReader(local, self._tokenizer, self.name))

    def _begin(self, prompt: PromptInput, asked: _Asked, row: int = 0) -> tuple[Future[None], Callable[[], Completion]]:
        """Begin a prompt; return its future, and what reads its events when it is done."""
        from penstock.generator.answer_reader import AnswerReader

        local = self._local(prompt, asked, row)
        events: list[tuple[Any, Any]] = []

        def finish() -> Completion:
            reader = AnswerReader(local, self._tokenizer, self.name)
            for request, event in events:
                reader.read(request, event)
            return asked.chosen(reader.completion())

        return self._engine.begin(self._engine.run(local, lambda *event: events.append(event))), finish

    def _many(
        self, prompts: Iterable[Any], asked: _Asked, progress: bool | ShowBatch | None, total: int | None
    ) -> Iterator[Completion | Exception]:
        with BatchReport(progress, total) as report:

            def count(answer: Completion | Exception) -> None:
                failed = isinstance(answer, Exception)
                tokens = 0 if isinstance(answer, Exception) else answer.finished.usage.completion_tokens
                report.ended(tokens, failed=failed)

            rows = itertools.count()
            batch = OrderedBatch(
                prompts, lambda prompt: self._begin(prompt, asked, next(rows)), self._engine.max_in_flight, count
            )
            try:
                yield from batch
            finally:
                batch.close()

    def _divided(self, prompt: Any, continuation: Any) -> tuple[list[int], list[int]]:
        if isinstance(prompt, str) and isinstance(continuation, str):
            loaded = self._engine.loaded
            bos, ends = loaded.files.defaults.bos_token_id, loaded.files.defaults.eos_token_ids
            return self._needed().divide(prompt, continuation, beginning=(bos,) if bos is not None else ends[:1])
        with _reading("prompt", _TEXT_OR_IDS):
            before = self._tokens(prompt) if isinstance(prompt, str) else ids_of(prompt)
        if isinstance(continuation, str):
            return before, self._needed().encode(continuation, add_special_tokens=False)
        with _reading("continuation", _TEXT_OR_IDS):
            return before, ids_of(continuation)

    def _tokens(self, text: str) -> list[int]:
        return self._needed().encode(text)

    def _needed(self) -> LocalTokenizer:
        if self._tokenizer is None:
            raise FailedPrecondition("a text needs the tokenizer, which is not loaded: send ids", reason="NO_TOKENIZER")
        return self._tokenizer


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments of a call, what goes with messages, and the caller's draft model."""

    call: CallArguments
    extras: ChatExtras
    assistant: Any = None

    @property
    def request(self) -> dict[str, Any]:
        """Options by their names."""
        return self.call.options

    def chosen(self, answer: Completion) -> Completion:
        """Return the answer with the choices that are wanted of it."""
        return answer if self.call.num_best is None else answer.best(self.call.num_best)


def _single(prompt: Any) -> Any:
    """Return one prompt, out of a batch of it alone: what a tokenizer returns has rows. Raises InvalidArgument."""
    from penstock.generator.requests import is_batch

    with _reading("prompt", _ONE_PROMPT):
        if not is_batch(prompt):
            return prompt
        rows = [*prompt]
    if len(rows) != 1:
        raise InvalidArgument("prompt", f"must be {_ONE_PROMPT}: one")
    return rows[0]


def _refuse_streamer(asked: _Asked, why: str) -> None:
    if asked.call.streamer is not None:
        raise ValueError(f"option 'streamer': {why}")


def _release_prefix(engine: weakref.ref[LocalEngine], blocks: list[int]) -> None:
    """Give a handle's blocks back, if the engine is still there."""
    found = engine()
    if found is not None:
        found.soon(lambda running: running.caller_blocks.release_prefix(blocks))


def _config(model: str | Path | None, options: Mapping[str, Any]) -> GenerationServiceConfig:
    """Return the service's configuration, as far as it is not about a server.

    Raises TypeError for a model that is no name and an option that is unknown or a server's, StartupError for a wrong
    value.
    """
    if isinstance(model, Mapping):
        raise TypeError(
            "model: must be a folder or a hub id; a dictionary is for penstock.compat.mindie.GeneratorTorch"
        )
    servers = {bound.name: bound.env for bound in options_of(ServerConfig)}
    known = {bound.name for bound in options_of(GenerationServiceConfig)} - servers.keys() - {"model_config"}
    for name in options:
        if name not in known:
            what = "is an option of a server" if name in servers else "is unknown"
            raise TypeError(f"option {name!r} {what}; those of Generator: docs/reference/configuration.md, generation")
    given = {} if model is None else {"model": str(model)}
    # A server's own variables, such as an address to listen on, must not make this fail.
    environment = {name: value for name, value in current_environment().items() if name not in servers.values()}
    # There are no event loops of services to give way to.
    environment.setdefault("PENSTOCK_COMPUTE_NICE", "0")
    # Nobody calls from outside, so nothing of the pool is set aside for named sequences.
    config = load_options(GenerationServiceConfig, {"model_access": "off", **given, **options}, environment)
    config.validate()
    return config


def _parts(
    items: Sequence[Any], most_items: int, most_tokens: int | None, size: Callable[[Any], int]
) -> Iterator[tuple[int, Sequence[Any]]]:
    """Yield (place of the first, items) of parts that a call may have. A single item is never cut."""
    begin = tokens = 0
    for index, item in enumerate(items):
        more = size(item)
        is_full = index - begin >= most_items or (most_tokens is not None and tokens + more > most_tokens)
        if index > begin and is_full:
            yield begin, items[begin:index]
            begin, tokens = index, 0
        tokens += more
    if not items or begin < len(items):
        yield begin, items[begin:]


@contextmanager
def _naming(place: str) -> Iterator[None]:
    """Put an item's place before the field of an error inside."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{place}.{error.field}", error.description, reason=error.reason) from error


@contextmanager
def _shifted(name: str, first: int) -> Iterator[None]:
    """Count the items of an error inside from the caller's first one."""
    try:
        yield
    except InvalidArgument as error:
        field = re.sub(rf"^{name}\[(\d+)\]", lambda match: f"{name}[{int(match[1]) + first}]", error.field or name)
        raise InvalidArgument(field, error.description, reason=error.reason) from error
