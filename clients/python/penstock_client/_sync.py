"""The synchronous client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from penstock.v1 import text_pb2, text_pb2_grpc

from penstock_client._exceptions import PenstockError, Unavailable, truncated_stream
from penstock_client._exceptions import stream_error as _stream_error
from penstock_client._given import embed_request, embeddings_of, score_request, scores_of
from penstock_client._options import GenerationOptions, Messages, chat_request, generate_request
from penstock_client._state import StreamState
from penstock_client._types import Completion, Delta, Embeddings, Scores
from penstock_client.config import ClientConfig

# A call object: an iterator of events with cancel(). grpc-stubs does not type what a stub returns as one.
_Open = Callable[[], Any]


class Stream(Iterator[Delta]):
    """Deltas of one request, as they come. Iterate it, or call `result()` for the whole answer.

    Leaving the `with` block, `close()` or garbage collection cancels a stream that has not ended: the server frees
    its KV blocks within two engine steps.
    """

    def __init__(self, open_call: _Open, state: StreamState) -> None:
        self._open, self._state = open_call, state
        self._call = open_call()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while True:
            try:
                delta = self._state.feed(next(self._call))
            except grpc.RpcError as error:
                time.sleep(self._state.retry_delay(error))
                self._call = self._open()
                continue
            except StopIteration:
                if self._state.finished is None:
                    raise truncated_stream() from None
                raise
            except PenstockError:
                self.close()
                raise
            if delta is not None:
                return delta

    @property
    def state(self) -> StreamState:
        """Started, Finished and the choices so far."""
        return self._state

    def result(self) -> Completion:
        """Read to the end and return the collected answer."""
        for _ in self:
            pass
        return self._state.completion()

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Client:
    """A connection to one Penstock router. Threads may share it."""

    def __init__(self, address: str, config: ClientConfig | None = None) -> None:
        """`address` is host:port, or what gRPC resolves. Raises ValueError for a token in the clear."""
        self.config = config or ClientConfig()
        self._metadata = self.config.metadata(address)
        options = self.config.channel_options()
        if self.config.tls:
            self._channel = grpc.secure_channel(address, self.config.tls.credentials(), options)
        else:
            self._channel = grpc.insecure_channel(address, options)
        self._stub: Any = text_pb2_grpc.TextServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; running streams end CANCELLED."""
        self._channel.close()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until connected. Raises Unavailable after `timeout` (default TimeoutConfig.connect) seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout or self.config.timeouts.connect)
        except grpc.FutureTimeoutError:
            raise Unavailable("no connection to the router", reason="NOT_CONNECTED") from None

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerationOptions]
    ) -> Stream:
        """Complete text or token ids. `timeout` in seconds is the request's deadline."""
        request = generate_request(prompt, options)
        return self._stream(self._stub.Generate, request, timeout)

    def chat(
        self,
        messages: Messages,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Stream:
        """Answer a conversation: a list of {"role", "content"} mappings, or a string for one user message."""
        request = chat_request(messages, tools, documents, chat_template_kwargs, options)
        return self._stream(self._stub.Chat, request, timeout)

    def _stream(self, method: Callable[..., Any], request: Any, timeout: float | None) -> Stream:
        state = StreamState(self.config.retry, timeout if timeout is not None else self.config.timeouts.generate)
        return Stream(lambda: method(request, timeout=state.remaining(), metadata=self._metadata), state)

    def score(
        self,
        items: Iterable[tuple[str, str]],
        *,
        top_logprobs: int | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Scores:
        """Log-probabilities of continuations: `items` are (prompt, continuation). `timeout` in seconds."""
        return scores_of(self._unary(self._stub.Score, score_request(items, top_logprobs, model), timeout))

    def embed(
        self, texts: str | Iterable[str], *, normalize: bool = False, model: str = "", timeout: float | None = None
    ) -> Embeddings:
        """Mean of the final hidden states of each text; of length 1 when `normalize`. `timeout` in seconds."""
        return embeddings_of(self._unary(self._stub.Embed, embed_request(texts, normalize, model), timeout))

    def list_models(self) -> list[text_pb2.Model]:
        """Models and adapters behind the router."""
        return list(self._unary(self._stub.ListModels, text_pb2.ListModelsRequest()).models)

    def get_model(self, name: str = "") -> text_pb2.Model:
        """One model; the only one when `name` is empty. Raises NotFound."""
        response: text_pb2.GetModelResponse = self._unary(self._stub.GetModel, text_pb2.GetModelRequest(name=name))
        return response.model

    def _unary(self, method: Callable[..., Any], request: Any, timeout: float | None = None) -> Any:
        try:
            return method(request, timeout=timeout or self.config.timeouts.unary, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _stream_error(error, None) from error
