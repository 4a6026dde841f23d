"""The asynchronous client. `_sync.py` is made from this file: run tools/make_sync_client.py after a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from penstock.v1 import text_pb2

from penstock_client._channel import END, AsyncChannel
from penstock_client._exceptions import PenstockError, Unavailable, stream_error, truncated_stream
from penstock_client._options import GenerationOptions, Messages, chat_request, generate_request, generate_requests
from penstock_client._score_embed import (
    embed_request,
    embeddings_of,
    evidence_of,
    score_request,
    scores_of,
    watermark_request,
)
from penstock_client._state import StreamState
from penstock_client._types import Completion, Delta, Embeddings, Scores, WatermarkEvidence
from penstock_client.config import ClientConfig


class AsyncStream(AsyncIterator[Delta]):
    """Deltas of one request, as they come. Iterate it, or await `result()` for the whole answer.

    Leaving the `async with` block, `close()` or garbage collection cancels a stream that has not ended: the server
    frees its KV blocks within two engine steps.
    """

    def __init__(self, open_call: Callable[[], Any], state: StreamState) -> None:
        """Send the request by `open_call`, which returns gRPC's call; a retry calls it again."""
        self._open, self._state = open_call, state
        self._start()

    def _start(self) -> None:
        self._call = self._open()
        self._read = AsyncChannel.reader(self._call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while True:
            try:
                event = await self._read()
                if event is END:
                    if self._state.finished is None:
                        raise truncated_stream()
                    raise StopAsyncIteration
                delta = self._state.feed(event)
            except grpc.RpcError as error:
                await asyncio.sleep(self._state.retry_delay(error))
                self._start()
                continue
            except PenstockError:
                self.close()
                raise
            if delta is not None:
                return delta

    @property
    def state(self) -> StreamState:
        """Started, Finished and the choices so far."""
        return self._state

    async def result(self) -> Completion:
        """Read to the end and return the collected answer."""
        async for _ in self:
            pass
        return self._state.completion()

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """A connection to one Penstock router. One event loop may use it."""

    def __init__(self, address: str, config: ClientConfig | None = None) -> None:
        """Connect to `address`, host:port or another name that gRPC resolves. Raises ValueError for a token in the
        clear."""
        self.config = config or ClientConfig()
        self._metadata = self.config.metadata(address)
        self._channel = AsyncChannel(address, self.config)
        self._stub = self._channel.stub

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running streams end CANCELLED."""
        await self._channel.close()

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until connected. Raises Unavailable after `timeout` (default TimeoutConfig.connect) seconds."""
        try:
            await self._channel.wait_ready(timeout or self.config.timeouts.connect)
        except TimeoutError:
            raise Unavailable("no connection to the router", reason="NOT_CONNECTED") from None

    def generate(
        self, prompt: str | Sequence[int] = "", *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> AsyncStream:
        """Complete text or token ids; an empty prompt is the option `inputs_embeds`, or begins with the model's
        beginning-of-sequence id.

        `timeout` in seconds is the request's deadline.
        """
        request = generate_request(prompt, options)
        return self._stream(self._stub.Generate, request, timeout)

    async def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> list[Completion | PenstockError]:
        """Complete several prompts under the same options. Return their answers in order, or the error of one.

        `concurrency` of them are with the server at once (default ClientConfig.max_concurrent_prompts). `timeout` in
        seconds is each one's own, from when it is sent; so is a seed. Raises TypeError and ValueError before anything
        is sent.
        """
        requests = generate_requests(prompts, options)
        most = self.config.max_concurrent_prompts if concurrency is None else concurrency
        if most < 1:
            raise ValueError("concurrency must be at least 1")
        return await self._channel.results(
            lambda request: self._stream(self._stub.Generate, request, timeout), requests, most
        )

    def chat(
        self,
        messages: Messages,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> AsyncStream:
        """Answer a conversation: a list of {"role", "content"} mappings, or a string for one user message.

        A content is a text, or OpenAI's list of parts, of which only those of text are read: InvalidArgument names
        any other.
        """
        request = chat_request(messages, tools, documents, chat_template_kwargs, options)
        return self._stream(self._stub.Chat, request, timeout)

    def _stream(self, method: Callable[..., Any], request: Any, timeout: float | None) -> AsyncStream:
        state = StreamState(self.config.retry, timeout if timeout is not None else self.config.timeouts.generate)
        return AsyncStream(lambda: method(request, timeout=state.remaining(), metadata=self._metadata), state)

    async def score(
        self,
        items: Iterable[tuple[str, str]],
        *,
        top_logprobs: int | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Scores:
        """Log-probabilities of continuations: `items` are (prompt, continuation). `timeout` in seconds."""
        return scores_of(await self._unary(self._stub.Score, score_request(items, top_logprobs, model), timeout))

    async def embed(
        self, texts: str | Iterable[str], *, normalize: bool = False, model: str = "", timeout: float | None = None
    ) -> Embeddings:
        """Mean of the final hidden states of each text; of length 1 when `normalize`. `timeout` in seconds."""
        return embeddings_of(await self._unary(self._stub.Embed, embed_request(texts, normalize, model), timeout))

    async def detect_watermark(
        self,
        output: str | Sequence[int],
        *,
        watermarking_config: Any = None,
        z_threshold: float | None = None,
        ignore_repeated_ngrams: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> WatermarkEvidence:
        """Tell whether text or ids, without their prompt, were generated under a watermark.

        `watermarking_config` is the option of the generation in question: a mapping, transformers' class, or None for
        the model's own. Ids are exact; text may become other ids than it was. `timeout` in seconds.
        """
        request = watermark_request(output, watermarking_config, z_threshold, ignore_repeated_ngrams, model)
        return evidence_of(await self._unary(self._stub.DetectWatermark, request, timeout))

    async def list_models(self) -> list[text_pb2.Model]:
        """Models and adapters behind the router."""
        response: text_pb2.ListModelsResponse = await self._unary(self._stub.ListModels, text_pb2.ListModelsRequest())
        return list(response.models)

    async def get_model(self, name: str = "") -> text_pb2.Model:
        """One model; the only one when `name` is empty. Raises NotFound."""
        response: text_pb2.GetModelResponse = await self._unary(
            self._stub.GetModel, text_pb2.GetModelRequest(name=name)
        )
        return response.model

    async def _unary(self, method: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        try:
            return await method(request, timeout=timeout or self.config.timeouts.unary, metadata=self._metadata)
        except grpc.RpcError as error:
            raise stream_error(error, None) from error
