"""The synchronous client. Generated from _async.py by tools/make_sync_client.py: do not edit."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc
from penstock.common.request_context import BACKEND_KEY
from penstock.v1 import admin_pb2, common_pb2, model_pb2, router_pb2, text_pb2, tokenizer_pb2

from penstock_client._channel import END, Channel, Exchange
from penstock_client._exceptions import PenstockError, Unavailable, stream_error, truncated_stream
from penstock_client._load_model import (
    LoadProgress,
    LoadState,
    UnloadedModel,
    load_requests,
    naming_path,
    unloaded_of,
)
from penstock_client._options import (
    Messages,
    Prompt,
    PromptOptions,
    TextRequest,
    check_many,
    render_request,
    text_request,
)
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
from penstock_client._write_weights import WriteState, write_requests
from penstock_client.config import ClientConfig


class Stream(Iterator[Delta]):
    """Deltas of one request, as they come. Iterate it, or call `result()` for the whole answer.

    Leaving the `with` block, `close()` or garbage collection cancels a stream that has not ended: the server
    frees its KV blocks within two engine steps.
    """

    def __init__(self, open_call: Callable[[], Any], state: StreamState) -> None:
        """Send the request by `open_call`, which returns gRPC's call; a retry calls it again."""
        self._open, self._state = open_call, state
        # Events that have come and were not looked at.
        self._events: deque[Any] = deque()
        self._start()

    def _start(self) -> None:
        self._call = Channel.events(self._open())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while True:
            while self._events:
                if (delta := self._next()) is not None:
                    return delta
            if not self._fetch():
                raise StopIteration

    def read(self) -> list[Delta]:
        """Return the deltas that have come, at least one; none at the end. In place of iteration.

        It is for a reader that may be behind. On grpcio's own channels it is one delta at a time.
        """
        while True:
            found = self._found()
            if found or not self._fetch():
                return found

    def run(self, take: Callable[[list[Delta]], bool]) -> bool:
        """Hand the deltas that have come to `take`, until it returns False, or to the end: that is returned as True.

        In place of iteration; it may be run again. A transport that hands over messages as they come
        (Events) wakes no task for one.
        """
        while True:
            if (found := self._found()) and not take(found):
                return False
            try:
                is_over = self._call.run(lambda events: self._push(events, take))
            except grpc.RpcError as error:
                self._retry(error)
                continue
            if is_over:
                self._check_end()
            return is_over

    def _push(self, events: list[Any], take: Callable[[list[Delta]], bool]) -> bool:
        self._events.extend(events)
        found = self._found()
        return not found or take(found)

    def _found(self) -> list[Delta]:
        """Deltas of the events that have come."""
        found = []
        while self._events:
            if (delta := self._next()) is not None:
                found.append(delta)
        return found

    def _fetch(self) -> bool:
        """Wait for further events, by another try where that is allowed; False at the end."""
        while True:
            try:
                self._events.extend(self._call.read_all())
            except grpc.RpcError as error:
                self._retry(error)
                continue
            if not self._events:
                self._check_end()
            return bool(self._events)

    def _retry(self, error: grpc.RpcError) -> None:
        """Wait and try again. Raises the error where that is not allowed."""
        time.sleep(self._state.retry_delay(error))
        self._start()

    def _check_end(self) -> None:
        if self._state.finished is None:
            self.close()
            raise truncated_stream()

    def _next(self) -> Delta | None:
        try:
            return self._state.feed(self._events.popleft())
        except PenstockError:
            self.close()
            raise

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

    def __init__(self, address: str, config: ClientConfig | None = None, *, channel: Any = None) -> None:
        """Connect to `address`, host:port or another name that gRPC resolves. Raises ValueError for a token in the
        clear.

        `channel`: one of gRPC's to use in place of a new one, such as one with interceptors. Its owner closes it.
        """
        self.config = config or ClientConfig()
        self._address = address
        self._metadata = self.config.metadata(address)
        self._channel = Channel(address, self.config, channel)
        self._stub, self._admin = self._channel.stub, self._channel.admin_stub

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def with_token(self, token: str) -> Self:
        """Return a client of the same connection that sends another bearer token; closing one closes both.

        Raises ValueError for a token in the clear.
        """
        twin = copy.copy(self)
        twin.config = dataclasses.replace(self.config, token=token)
        twin._metadata = twin.config.metadata(self._address)
        return twin

    def close(self) -> None:
        """Close the connection; running streams end CANCELLED."""
        self._channel.close()

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until connected. Raises Unavailable after `timeout` (default TimeoutConfig.connect) seconds."""
        try:
            self._channel.wait_ready(timeout or self.config.timeouts.connect)
        except TimeoutError:
            told = "; ".join(filter(None, ("no connection to the router", self._channel.through)))
            raise Unavailable(told, reason="NOT_CONNECTED") from None

    def generate(
        self, prompt: Prompt = "", *, timeout: float | None = None, **options: Unpack[PromptOptions]
    ) -> Completion:
        """Answer a prompt: a text, token ids, or a conversation, a list of {"role", "content"} mappings.

        An empty prompt is the option `inputs_embeds`, or begins with the model's beginning-of-sequence id. A content of
        a message is a text, or OpenAI's list of parts. Only those of text are read: InvalidArgument names any
        other. `timeout` in seconds is the request's deadline.
        """
        with self.stream(prompt, timeout=timeout, **options) as stream:
            return stream.result()

    def stream(self, prompt: Prompt = "", *, timeout: float | None = None, **options: Unpack[PromptOptions]) -> Stream:
        """Answer a prompt as `generate` does, delta by delta. Closing the stream cancels the request."""
        return self._open(text_request(prompt, options), timeout)

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        concurrency: int | None = None,
        timeout: float | None = None,
        **options: Unpack[PromptOptions],
    ) -> Iterator[Completion | Exception]:
        """Yield the answer to each prompt, in order: a Completion, or the exception that it ended with.

        `prompts` may be an iterator of any length: it is read as there is room, and memory stays bounded. Leaving the
        loop cancels what is with the server: `concurrency` prompts at once (default
        ClientConfig.max_concurrent_prompts). `timeout` in seconds is each one's own, from when it is sent; so is a
        seed. A wrong option is a TypeError or ValueError before anything is sent.
        """
        check_many(prompts, options)
        most = self.config.max_concurrent_prompts if concurrency is None else concurrency
        if most < 1:
            raise ValueError("concurrency must be at least 1")
        return self._channel.results(lambda prompt: self.stream(prompt, timeout=timeout, **options), prompts, most)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name == "chat":
                raise AttributeError(
                    'chat is now generate([{"role": "user", "content": ...}]), which answers, or stream() of the same'
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _open(self, request: TextRequest, timeout: float | None) -> Stream:
        method = self._stub.Chat if isinstance(request, text_pb2.ChatRequest) else self._stub.Generate
        timeout = timeout if timeout is not None else self.config.timeouts.generate
        state = StreamState(self.config.retry, timeout, self._channel.through)
        return Stream(lambda: method(request, timeout=state.remaining(), metadata=self._metadata_for("")), state)

    def score(
        self,
        items: Iterable[tuple[str, str]],
        *,
        top_logprobs: int | None = None,
        model: str = "",
        adapter: str = "",
        timeout: float | None = None,
    ) -> Scores:
        """Log-probabilities of continuations: `items` are (prompt, continuation). `timeout` in seconds."""
        request = score_request(items, top_logprobs, model, adapter)
        return scores_of(self._unary(self._stub.Score, request, timeout))

    def embed(
        self,
        texts: str | Iterable[str],
        *,
        normalize: bool = False,
        model: str = "",
        adapter: str = "",
        timeout: float | None = None,
    ) -> Embeddings:
        """Mean of the final hidden states of each text; of length 1 when `normalize`. `timeout` in seconds."""
        request = embed_request(texts, normalize, model, adapter)
        return embeddings_of(self._unary(self._stub.Embed, request, timeout))

    def detect_watermark(
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
        return evidence_of(self._unary(self._stub.DetectWatermark, request, timeout))

    def tokenize(
        self,
        texts: str | Iterable[str],
        *,
        add_special_tokens: bool = True,
        model: str = "",
        timeout: float | None = None,
    ) -> list[list[int]]:
        """Token ids of each text, as `generate` makes them. `timeout` in seconds."""
        request = text_pb2.TokenizeRequest(
            model=model, texts=[texts] if isinstance(texts, str) else texts, add_special_tokens=add_special_tokens
        )
        response: text_pb2.TokenizeResponse = self._unary(self._stub.Tokenize, request, timeout)
        return [list(sequence.ids) for sequence in response.sequences]

    def detokenize(
        self,
        sequences: Iterable[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
        model: str = "",
        timeout: float | None = None,
    ) -> list[str]:
        """Text of each run of token ids. `timeout` in seconds."""
        request = text_pb2.DetokenizeRequest(
            model=model,
            sequences=[common_pb2.TokenIds(ids=ids) for ids in sequences],
            skip_special_tokens=skip_special_tokens,
        )
        response: text_pb2.DetokenizeResponse = self._unary(self._stub.Detokenize, request, timeout)
        return list(response.texts)

    def render_chat(
        self,
        messages: Messages,
        *,
        tools: Iterable[Mapping[str, Any]] = (),
        documents: Iterable[Mapping[str, str]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> tuple[str, list[int]]:
        """The prompt that `generate` makes of a conversation: its text, and its token ids. `timeout` in seconds."""
        options = {
            "model": model,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        request = render_request(messages, tools, documents, chat_template_kwargs, options)
        response: text_pb2.RenderChatResponse = self._unary(self._stub.RenderChat, request, timeout)
        return response.text, list(response.token_ids)

    def list_models(self) -> list[text_pb2.Model]:
        """Models and adapters behind the router."""
        response: text_pb2.ListModelsResponse = self._unary(self._stub.ListModels, text_pb2.ListModelsRequest())
        return list(response.models)

    def get_model(self, name: str = "") -> text_pb2.Model:
        """One model; the only one when `name` is empty. Raises NotFound."""
        response: text_pb2.GetModelResponse = self._unary(self._stub.GetModel, text_pb2.GetModelRequest(name=name))
        return response.model

    def get_tokenizer(self, model: str = "") -> tokenizer_pb2.GetTokenizerResponse:
        """Facts about a model's tokenizer: special ids and chat templates. Raises NotFound, and Unavailable while the
        router knows no tokenizer of the model."""
        response: text_pb2.GetModelResponse = self._unary(
            self._stub.GetModel, text_pb2.GetModelRequest(name=model, with_tokenizer=True)
        )
        if not response.HasField("tokenizer"):
            raise Unavailable("the router knows no tokenizer of this model", reason="TOKENIZER_UNAVAILABLE")
        return response.tokenizer

    def list_adapters(self, *, backend: str = "") -> list[admin_pb2.Adapter]:
        """LoRA adapters of a generation service, for its operators.

        `backend`: the one that the router asks where it has several, by its address or its name in --backend.
        """
        request = admin_pb2.ListAdaptersRequest()
        response: admin_pb2.ListAdaptersResponse = self._unary(self._admin.ListAdapters, request, backend=backend)
        return list(response.adapters)

    def load_adapter(
        self, name: str, path: str = "", *, replace: bool = False, backend: str = "", timeout: float | None = None
    ) -> admin_pb2.Adapter:
        """Have a generation service load a PEFT folder below its --adapter-root; requests name it as `adapter` then.

        Without `path` it is the folder of that name. `replace`: a name that is known gets the new adapter, and requests
        that run keep the old one. `backend` as in list_adapters; `timeout` in seconds.
        """
        request = admin_pb2.LoadAdapterRequest(name=name, path=path, replace=replace)
        response: admin_pb2.LoadAdapterResponse = self._unary(
            self._admin.LoadAdapter, request, timeout, backend=backend
        )
        return response.adapter

    def unload_adapter(self, name: str, *, backend: str = "") -> int:
        """Have a generation service forget an adapter. Return the number of requests that go on with it.

        `backend` as in list_adapters. Raises NotFound.
        """
        request = admin_pb2.UnloadAdapterRequest(name=name)
        response: admin_pb2.UnloadAdapterResponse = self._unary(self._admin.UnloadAdapter, request, backend=backend)
        return response.live_requests

    def drain(self, *, grace: float | None = None, backend: str = "", timeout: float | None = None) -> int:
        """Have a generation service refuse new requests and wait for live ones; return how many still run.

        Live ones are aborted after `grace` seconds, which a router moves; without it they have all the time. It stays
        drained until `resume`, also when `timeout` seconds have passed. `backend` as in list_adapters.
        """
        request, wait = admin_pb2.DrainRequest(grace_seconds=grace), self._wait(grace, timeout)
        response: admin_pb2.DrainResponse = self._unary(self._admin.Drain, request, wait, backend=backend)
        return response.running_requests

    def pause(self, *, max_seconds: float | None = None, backend: str = "") -> admin_pb2.PauseResponse:
        """Have a generation service hold its steps, and refuse new requests, until `resume`.

        Live requests keep their keys and values and go on afterwards; aborts and deadlines end them meanwhile. It
        resumes by itself after `max_seconds`, by default after the service's --max-pause-seconds. `backend` as in
        list_adapters.
        """
        request = admin_pb2.PauseRequest(max_seconds=max_seconds)
        response: admin_pb2.PauseResponse = self._unary(self._admin.Pause, request, backend=backend)
        return response

    def resume(self, *, backend: str = "") -> None:
        """Have a generation service take requests again after `drain` or `pause`. `backend` as in list_adapters."""
        self._unary(self._admin.Resume, admin_pb2.ResumeRequest(), backend=backend)

    def reload(
        self, *, grace: float | None = None, backend: str = "", timeout: float | None = None
    ) -> admin_pb2.ReloadResponse:
        """Have a generation service read its model's weights again, between a drain and a resume.

        `grace`, `backend` and `timeout` as for `drain`. Raises FailedPrecondition for a folder with another model.
        """
        request, wait = admin_pb2.ReloadRequest(grace_seconds=grace), self._wait(grace, timeout)
        response: admin_pb2.ReloadResponse = self._unary(self._admin.Reload, request, wait, backend=backend)
        return response

    def reload_models(self) -> router_pb2.ReloadModelsResponse:
        """Have a router read its file of models now; what changed, by name. Raises FailedPrecondition MODELS_FILE."""
        response: router_pb2.ReloadModelsResponse = self._unary(
            self._channel.router.ReloadModels, router_pb2.ReloadModelsRequest()
        )
        return response

    def list_keys(self, *, days: int = 1) -> list[router_pb2.KeyFacts]:
        """Describe the keys of a router's --keys-file, without secrets, each with its use in `days` days (UTC).

        Raises FailedPrecondition KEYS_OFF.
        """
        request = router_pb2.ListKeysRequest(days=days)
        response: router_pb2.ListKeysResponse = self._unary(self._channel.router.ListKeys, request)
        return list(response.keys)

    def revoke_key(self, label: str) -> None:
        """Refuse a key from now on, at all routers that share a ledger. Raises NotFound KEY_NOT_FOUND."""
        self._unary(self._channel.router.RevokeKey, router_pb2.RevokeKeyRequest(label=label))

    def roll_model(
        self,
        model: str = "",
        *,
        grace: float | None = None,
        on_step: Callable[[router_pb2.RollModelResponse], None] | None = None,
        timeout: float | None = None,
    ) -> list[router_pb2.RollModelResponse]:
        """Have a router reload a model's backends one after the other, while the others serve; return the steps.

        `grace` as for `drain`. `on_step` is called as each step begins. Raises FailedPrecondition ONE_BACKEND.
        """
        request = router_pb2.RollModelRequest(model=model, grace_seconds=grace)
        call = self._channel.router.RollModel(request, timeout=timeout, metadata=self._metadata_for(""))
        steps = []
        try:
            for step in call:
                steps.append(step)
                if on_step is not None:
                    on_step(step)
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
        finally:
            call.cancel()
        return steps

    def load_model(
        self,
        folder: Path | str | None = None,
        *,
        path: str | None = None,
        name: str = "",
        options: Mapping[str, Any] | None = None,
        on_progress: Callable[[LoadProgress], None] | None = None,
        backend: str = "",
        timeout: float | None = None,
    ) -> model_pb2.GetModelInfoResponse:
        """Load a model into a generation service that has none, and return its facts.

        The files of `folder` are sent, or the server reads `path` below its --model-root. `options` are those of
        LoadModelOptions, such as {"dtype": "bfloat16"}. `on_progress` is called as the load goes on. The address is the
        service's own, or a router's; `backend` names one of several behind it. The load is given up when this is, or
        when `timeout` seconds have passed.
        """
        with naming_path():
            return self._load(load_requests(folder, path, name, options), on_progress, backend, timeout)

    def _load(
        self,
        requests: Iterable[model_pb2.LoadModelRequest],
        on_progress: Callable[[LoadProgress], None] | None,
        backend: str,
        timeout: float | None,
    ) -> model_pb2.GetModelInfoResponse:
        state = LoadState(on_progress)
        exchange = Exchange(self._channel.models.LoadModel, timeout=timeout, metadata=self._metadata_for(backend))
        try:
            for request in requests:
                exchange.send(request)
                state.sent(request)
                while state.waits:
                    state.take(exchange.read(), END)
            exchange.end()
            while not state.is_over:
                state.take(exchange.read(), END)
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
        finally:
            exchange.cancel()
        return state.info()

    def write_weights(
        self,
        tensors: Mapping[str, Any],
        *,
        model: str = "",
        backend: str = "",
        timeout: float | None = None,
    ) -> model_pb2.WeightsWritten:
        """Write new weights into the model of a generation service (--write-weights), between two steps.

        `tensors` are torch tensors or numpy arrays by their names in Hugging Face's checkpoints; others stay as they
        are. All are used from one step on, or, where this raises, none. Live requests go on; `finished` of an answer
        has `first_weights_version` and `last_weights_version`. `backend` as for `load_model`: a router writes to one.
        """
        state, metadata = WriteState(), self._metadata_for(backend)
        exchange = Exchange(self._channel.models.WriteWeights, timeout=timeout, metadata=metadata)
        try:
            with naming_path():
                for request in write_requests(tensors, model):
                    exchange.send(request)
                    state.take(exchange.read(), END)
                    if state.is_over:
                        break
                exchange.end()
                while not state.is_over:
                    state.take(exchange.read(), END)
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
        finally:
            exchange.cancel()
        return state.written()

    def unload_model(
        self, *, grace: float | None = None, backend: str = "", timeout: float | None = None
    ) -> UnloadedModel:
        """End the model of a generation service, which can then load another one.

        Live requests have `grace` seconds before they are aborted; without it FailedPrecondition BUSY while there are
        some. `backend` as for `load_model`. `timeout` in seconds; the model ends even when it passes.
        """
        request, wait = model_pb2.UnloadModelRequest(grace_seconds=grace), self._wait(grace, timeout)
        return unloaded_of(self._unary(self._channel.models.UnloadModel, request, wait, backend=backend))

    def model_info(self, *, backend: str = "") -> model_pb2.GetModelInfoResponse:
        """Facts of a generation service's model, and its state; `backend` as for `load_model`."""
        request = model_pb2.GetModelInfoRequest()
        info: model_pb2.GetModelInfoResponse = self._unary(self._channel.models.GetModelInfo, request, backend=backend)
        return info

    def _wait(self, grace: float | None, timeout: float | None) -> float | None:
        """Time for a call that lets live requests end."""
        unary = self.config.timeouts.unary
        return unary + (grace or 0.0) if timeout is None and unary is not None else timeout

    def _metadata_for(self, backend: str) -> tuple[tuple[str, str], ...]:
        named = ((BACKEND_KEY, backend),) if backend else ()
        return (*self._metadata, *self.config.call_metadata(), *named)

    def _unary(
        self, method: Callable[..., Any], request: Any, timeout: float | None = None, *, backend: str = ""
    ) -> Any:
        try:
            metadata = self._metadata_for(backend)
            return method(request, timeout=timeout or self.config.timeouts.unary, metadata=metadata)
        except grpc.RpcError as error:
            raise stream_error(error, None, self._channel.through) from error
