"""Base of the servicers: one loaded model's engine with its live requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from penstock.common.dtypes import dtype_name
from penstock.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from penstock.common.request_context import new_request_id
from penstock.generation.adapters.adapter_access import AdapterAccess
from penstock.generation.config import GenerationServiceConfig
from penstock.generation.core.adapter import Adapter
from penstock.generation.core.decoding_mode import WatermarkOptions
from penstock.generation.core.plugins import NO_OBJECTS, CallerObjects
from penstock.generation.core.prompt_embeds import PLACEHOLDER
from penstock.generation.core.request import ItemResult, Request, TokenHealingOptions
from penstock.generation.core.sampling_params import SamplingParams
from penstock.generation.delivery.deltas import DeltaMaker
from penstock.generation.delivery.hub import OutputHub
from penstock.generation.delivery.item_batch import ItemBatch
from penstock.generation.engine.config import EngineConfig
from penstock.generation.engine.decoding.assisted import CALLERS_DRAFTS, with_drafts
from penstock.generation.engine.engine import Engine
from penstock.generation.engine.loop import EngineLoop
from penstock.generation.engine.stats import EngineLoad, EngineStats
from penstock.generation.grammar.call_grammar import CallHolder
from penstock.generation.grammar.call_spec import CallSpec
from penstock.generation.grammar.compiler import GrammarCompiler
from penstock.generation.graphs.model_access import ModelAccess
from penstock.generation.options.detect_watermark import DetectWatermarkCommand, check_detect_watermark
from penstock.generation.options.request_limits import RequestLimits
from penstock.generation.options.request_options import GenerateOptions
from penstock.generation.options.resolve import resolve
from penstock.generation.options.score_embed_commands import (
    EmbedCommand,
    ScoreCommand,
    check_embed,
    check_score,
    embed_requests,
    followers,
    score_requests,
)
from penstock.generation.options.tensor_options import TensorSizes, resolve_tensors
from penstock.generation.options.thinking import with_thought_budget
from penstock.generation.options.validate import validate, with_prompt
from penstock.generation.runner.model_runner import WarmUpWork
from penstock.generation.sampling.watermark_detector import Detector, TooFewTokens, WatermarkEvidence, detector_of
from penstock.generation.startup.loaded_model import LoadedModel
from penstock.generation.startup.weight_updates import WeightUpdates
from penstock.generation.wire.embeds_intake import EmbedsIntake

T = TypeVar("T")


class WatermarkCalls:
    """DetectWatermark calls off the event loop: one is computed, some wait. Used from the event loop only."""

    def __init__(self, most: int, retry_seconds: float) -> None:
        """`most`: most calls at once; more are refused and told to wait for `retry_seconds`."""
        self._most = most
        self._retry_seconds = retry_seconds
        self._calls = 0
        self._turn = asyncio.Lock()

    async def run(
        self, detector: Detector, command: DetectWatermarkCommand, deadline: float | None
    ) -> WatermarkEvidence:
        """Detect on another thread, which stops when the caller is gone.

        Raises ResourceExhausted, DeadlineExceeded and TooFewTokens.
        """
        if self._calls >= self._most:
            raise ResourceExhausted(
                "too many watermarks are being looked for",
                reason="QUEUE_FULL",
                retry_after_seconds=self._retry_seconds,
            )
        is_gone = threading.Event()

        def check() -> None:
            if is_gone.is_set():
                raise _CallerGone

        self._calls += 1
        try:
            async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()), self._turn:
                return await asyncio.to_thread(
                    detector.detect, command.token_ids, z_threshold=command.z_threshold, check=check
                )
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed", reason="DEADLINE_EXCEEDED", metadata={"stage": "watermark"}
            ) from None
        finally:
            is_gone.set()
            self._calls -= 1


class _CallerGone(Exception):
    """End of a detection without a caller."""


@dataclass(slots=True, kw_only=True)
class GenerationCore:
    """A loaded model behind its engine. Used from the event loop only."""

    config: GenerationServiceConfig
    loaded: LoadedModel
    loop: EngineLoop
    hub: OutputHub
    stats: EngineStats
    compiler: GrammarCompiler
    adapter_access: AdapterAccess
    # Puts weights that are read again in place of `loaded`'s, while no request is live. Raises FailedPrecondition.
    reload: Callable[[], Awaitable[None]]
    # Puts tensors of callers in place of weights, beside live requests.
    updates: WeightUpdates
    # The model opened to callers; None: it is not (--model-access).
    access: ModelAccess | None = None
    # Of the weights: 0 as loaded, one more after every change.
    weights_version: int = 0
    limits: RequestLimits = field(init=False)
    watermark_calls: WatermarkCalls = field(init=False)
    embeds_intake: EmbedsIntake = field(init=False)

    def __post_init__(self) -> None:
        config, engine = self.config, self.loaded.engine.config
        retry_seconds = engine.queue_full_retry_seconds
        dtype = dtype_name(self.loaded.weights.model.dtype)
        self.limits = config.request_limits()
        self.watermark_calls = WatermarkCalls(config.max_watermark_calls, retry_seconds)
        self.embeds_intake = EmbedsIntake(dtype, engine.block_size, config.max_live_embeds_bytes, retry_seconds)

    @property
    def load(self) -> EngineLoad:
        """Load of the engine; requests in preparation, which it does not know yet, wait, too."""
        load = self.loop.load
        return load._replace(waiting_requests=load.waiting_requests + self.hub.num_prepared)

    def renew(self, loaded: LoadedModel, access: ModelAccess | None) -> None:
        """Serve other weights, from the next request on."""
        self.loaded, self.access = loaded, access
        self.weights_version += 1

    async def finish(self, grace: float | None) -> int:
        """Wait for live requests. After `grace` seconds abort them, wait for their ends and return their number.

        Without a grace all are waited for.
        """
        try:
            async with asyncio.timeout(grace):
                await self.hub.wait_idle()
        except TimeoutError:
            aborted = self.hub.end_drained()
            await self.hub.wait_idle()
            return aborted
        return 0

    def prepare(self, options: GenerateOptions, deadline: float | None, own: CallerObjects = NO_OBJECTS) -> DeltaMaker:
        """Check options and make their request and events. Raises what `validate` and `resolve` raise.

        `deadline` is the call's, a time.monotonic() or None; the options' own timeout may be earlier. `own`: objects of
        a caller in this process.
        """
        loaded = self.loaded
        options = with_prompt(options, loaded.files.defaults, loaded.served)
        served = loaded.served if own.drafts is None else replace(loaded.served, assistant_model=CALLERS_DRAFTS)
        validate(options, served, self.limits)
        resolved = resolve(options, loaded.files.defaults, served, self.limits)
        params = self._with_tensors(options, with_drafts(resolved.params, own.drafts))
        params = with_thought_budget(params, options, loaded.files.token_bytes)
        plugins = loaded.files.plugins.make(options.options, own)
        if plugins is not None:
            params = replace(params, plugins=plugins)
        arrival = time.monotonic()
        # None where `complete` must read it first.
        adapter = loaded.weights.adapters.get(options.adapter) if options.adapter else None
        _check_digest(adapter, options)
        request = Request(
            request_id=options.request_id or new_request_id(),
            prompt_token_ids=_prompt(options),
            params=params,
            arrival_time=arrival,
            resumed_token_ids=options.resumed_token_ids,
            cache_salt=options.cache_salt,
            fair_share_key=options.fair_share_key,
            priority=options.priority,
            deadline=_earliest(deadline, arrival, options.timeout_seconds),
            attempt_epoch=options.attempt_epoch,
            warnings=resolved.warnings,
            token_healing=self._token_healing(options) if resolved.params.token_healing else None,
            begins_text=options.begins_text,
            thought=options.thought,
            adapter=adapter,
        )
        return DeltaMaker(request, loaded.served.name, resolved.stream_interval)

    @staticmethod
    def takes_time(request: Request, options: GenerateOptions) -> bool:
        """True when `complete` must be awaited before the request is submitted."""
        return options.take_time or (request.adapter is None and bool(options.adapter))

    def _token_healing(self, options: GenerateOptions) -> TokenHealingOptions | None:
        """Return None when no other token can replace the prompt's last one, or it is the only one."""
        prefixes, prompt = self.loaded.token_prefixes, options.prompt_token_ids
        if prefixes is None or len(prompt) < 2:
            return None
        token_ids = prefixes.extensions(prompt[-1])
        return TokenHealingOptions(token_ids, partial(prefixes.added_text, prompt[-1])) if len(token_ids) > 1 else None

    def _with_tensors(self, options: GenerateOptions, params: SamplingParams) -> SamplingParams:
        if not options.output.tensors:
            return params
        model = self.loaded.weights.model.config
        sizes = TensorSizes(model.vocab_size, model.num_layers, model.hidden_size, model.num_heads)
        tensors = resolve_tensors(options.output, params, options.num_prompt_tokens, sizes, self.limits)
        return replace(params, tensors=tensors)

    async def complete(self, request: Request, options: GenerateOptions) -> None:
        """Convert a request's inputs_embeds, compile its constraint, and read an adapter that is not in memory. Abort
        and deadline end the wait.

        To be awaited between `prepare` and the submission of a request that `takes_time`. The request's id is taken
        from here on. Raises as `EmbedsIntake.room`, `EmbedsIntake.convert`, `GrammarCompiler.compile` and
        `AdapterStore.bring`.
        """
        request_id, deadline = request.request_id, request.deadline
        if options.adapter and request.adapter is None:
            request.adapter = await self._bring(options.adapter, request_id, deadline)
            _check_digest(request.adapter, options)
        tensor, constraint = options.inputs_embeds, options.constraint
        live_bytes = 0 if tensor is None else self.hub.embeds_bytes
        # The adapter counts as used meanwhile: else others would take its place, and it stayed in memory uncounted.
        with self.loaded.weights.adapters.in_use(request.adapter), self.embeds_intake.room(tensor, live_bytes):
            if tensor is not None:
                converting = self.embeds_intake.convert(tensor, options.num_placeholders)
                request.embeds = await self._before_submission(request_id, deadline, converting, "inputs_embeds")
            if constraint is not None:
                compiling = self.compiler.compile(constraint)
                grammar = await self._before_submission(request_id, deadline, compiling, "constraint")
                if not options.may_be_closed:
                    grammar = grammar.cut_by_limit()
                request.grammar = grammar.ending_itself() if request.params.ignore_eos else grammar
            elif options.calls is not None and options.holds_calls:
                calls = self._hold_calls(request, options.calls)
                held = await self._before_submission(request_id, deadline, calls, "constraint")
                request.grammar = held.ending_itself() if held is not None and request.params.ignore_eos else held

    async def _hold_calls(self, request: Request, spec: CallSpec) -> CallHolder | None:
        """Return the grammar of calls; None: there is none. Raises as `compile_calls` where it is required; else the
        request has a warning."""
        try:
            return await self.compiler.compile_calls(spec)
        except (InvalidArgument, ResourceExhausted, Internal) as error:
            if spec.is_required:
                raise
            request.warnings += (f"calls are not held to a grammar, which {error.message.removeprefix('calls: ')}",)
            return None

    async def _before_submission(
        self, request_id: str, deadline: float | None, work: Coroutine[Any, Any, T], stage: str
    ) -> T:
        remaining = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(remaining):
                return await self.hub.prepare(request_id, work)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed", reason="DEADLINE_EXCEEDED", metadata={"stage": stage}
            ) from None

    async def score(
        self, command: ScoreCommand, deadline: float | None, check_open: Callable[[], object] = lambda: None
    ) -> list[ItemResult]:
        """Run a Score to its end. Raises what `check_score` raises, or the first error of an item.

        `check_open` is called after an adapter was read, which takes time: it raises if no work is accepted any more.
        """
        check_score(command, self.loaded.served, self.limits)
        adapter = await self._adapter_of_items(command.adapter, deadline, check_open)
        requests = score_requests(command, time.monotonic(), deadline, adapter)
        return await ItemBatch(
            self.hub, requests, "items", self.config.max_items_in_flight, followers(command.items)
        ).run()

    async def embed(
        self, command: EmbedCommand, deadline: float | None, check_open: Callable[[], object] = lambda: None
    ) -> list[ItemResult]:
        """Run an Embed to its end. Raises what `check_embed` raises, or the first error of an input; see `score`."""
        check_embed(command, self.loaded.served, self.limits, self.loaded.weights.model.config.hidden_size)
        adapter = await self._adapter_of_items(command.adapter, deadline, check_open)
        requests = embed_requests(command, time.monotonic(), deadline, adapter)
        return await ItemBatch(self.hub, requests, "inputs", self.config.max_items_in_flight, {}).run()

    async def _adapter_of_items(
        self, name: str, deadline: float | None, check_open: Callable[[], object]
    ) -> Adapter | None:
        adapter = self.loaded.weights.adapters.get(name) if name else None
        if name and adapter is None:
            # The call has no id of its own; it counts as a prepared request, so that a drain waits for it.
            adapter = await self._bring(name, new_request_id(), deadline)
            check_open()
        return adapter

    async def _bring(self, name: str, request_id: str, deadline: float | None) -> Adapter:
        """Read an adapter that is not in memory, on a thread. Raises as `AdapterStore.bring`."""
        bringing = asyncio.to_thread(self.loaded.weights.adapters.bring, name)
        return await self._before_submission(request_id, deadline, bringing, "adapter")

    async def warm_up(self, size: WarmUpSize | None = None) -> None:
        """Run the model as at the start, or as far as `size` asks. The prefix cache is empty afterwards.

        Raises InvalidArgument, and FailedPrecondition BUSY while requests are live or callers hold blocks.
        """
        work = None if size is None else size.work(self.loaded.engine.config, self.config.max_warm_up_steps)
        await asyncio.wrap_future(self.loop.run_on_engine(lambda engine: _warm_up(engine, self.loaded, work)))

    async def clear_cache(self, request_ids: Sequence[str] = ()) -> int:
        """Forget every prefix that no running request holds; with ids, the computed blocks of these live requests.

        Returns the number of blocks. Raises as `Engine.release_cache`.
        """

        def clear(engine: Engine) -> int:
            return engine.release_cache(request_ids) if request_ids else engine.clear_cache()

        cleared = await asyncio.wrap_future(self.loop.run_on_engine(clear))
        # The engine publishes its load after carrying out commands, so the next one sees it published.
        await asyncio.wrap_future(self.loop.run_on_engine(lambda _: None))
        self.hub.notify()
        return cleared

    async def detect_watermark(self, command: DetectWatermarkCommand, deadline: float | None) -> WatermarkEvidence:
        """Look for a watermark in given tokens. Raises the errors of `check_detect_watermark` and
        `WatermarkCalls.run`."""
        loaded = self.loaded
        check_detect_watermark(command, loaded.served, self.limits)
        options = loaded.files.defaults.options.watermarking_config or WatermarkOptions()
        detector = detector_of(
            command.watermark or options,
            loaded.served.vocab_size,
            bos_token_id=loaded.weights.model.config.bos_token_id,
            ignore_repeated_ngrams=command.ignore_repeated_ngrams,
        )
        try:
            return await self.watermark_calls.run(detector, command, deadline)
        except TooFewTokens as error:
            raise InvalidArgument("token_ids", str(error)) from None


def _check_digest(adapter: Adapter | None, options: GenerateOptions) -> None:
    """Raise NotFound if an adapter's name stands for other weights than when the request began."""
    if adapter is not None and options.adapter_digest and options.adapter_digest != adapter.digest:
        raise NotFound(
            "adapter_digest: the adapter's name stands for other weights here",
            reason="ADAPTER_DIFFERS",
            field="adapter_digest",
        )


def _prompt(options: GenerateOptions) -> list[int]:
    """Return an id for each prompt token."""
    if not options.num_placeholders:
        return options.prompt_token_ids
    return [PLACEHOLDER] * options.num_placeholders + options.prompt_token_ids


def _earliest(deadline: float | None, arrival: float, timeout: float | None) -> float | None:
    if timeout is None:
        return deadline
    return arrival + timeout if deadline is None else min(deadline, arrival + timeout)


@dataclass(frozen=True, slots=True)
class WarmUpSize:
    """Size of a warm-up, in tokens; it is cut to what the engine computes and the pool holds."""

    # Prompt tokens of one step, over all sequences.
    prefill_tokens: int = 4096
    # Longest prompt and output together.
    sequence_tokens: int = 2560
    # Longest prompt; None: `sequence_tokens`.
    input_tokens: int | None = None
    # Decode steps.
    iterations: int | None = None

    def work(self, config: EngineConfig, most_steps: int) -> WarmUpWork:
        """Return the work that an engine of this configuration does. Raises InvalidArgument naming a field below 1."""
        for name in ("prefill_tokens", "sequence_tokens", "input_tokens", "iterations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidArgument(name, "must be at least 1")
        rows = min(self.prefill_tokens, config.max_batch_tokens)
        longest = min(self.sequence_tokens, config.max_context_tokens)
        tokens = max(1, min(self.input_tokens or longest, rows, longest - 1))
        sequences = min(max(1, rows // tokens), config.max_running_sequences)
        return WarmUpWork(sequences, tokens, max(1, min(self.iterations or 1, longest - tokens, most_steps)))


def _warm_up(engine: Engine, loaded: LoadedModel, work: WarmUpWork | None) -> None:
    """Warm up, on the engine's thread. It writes into blocks of the pool, so none may be in use or cached."""
    if engine.has_work:
        raise FailedPrecondition("requests are live: warm up while there are none", reason="BUSY")
    if engine.caller_blocks.device:
        raise FailedPrecondition("a caller holds blocks of the pool: release them first", reason="BUSY")
    engine.clear_cache()
    loaded.engine.warm_up(work)
