"""Handlers of TokenizerService: they check limits, hand work to threads and processes, and count."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from penstock.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from penstock.common.tracing import stage
from penstock.text.detokenizer import REPLACEMENT
from penstock.tokenizer import convert
from penstock.tokenizer.chat_template import Rendered
from penstock.tokenizer.decode_stream import DecodeSession
from penstock.tokenizer.metrics import Operation, TokenizerMetrics
from penstock.tokenizer.service import TokenizerService
from penstock.tokenizer.tokenizer import Encoded, EncodeOptions, TextTokenizer
from penstock.v1 import tokenizer_pb2 as pb
from penstock.v1 import tokenizer_pb2_grpc

# Default receive limit of gRPC clients.
MAX_RESPONSE_BYTES = 4 << 20
M = TypeVar("M", bound=Message)
Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Handlers of TokenizerService. They run on the event loop; encoding, decoding and rendering do not.

    The exception is work that costs less than handing it to a thread: encoding a few sentences, and a DecodeStream
    message, which is one engine step and takes microseconds an item. Larger requests go to a thread.
    """

    def __init__(self, metrics: TokenizerMetrics) -> None:
        self._metrics = metrics
        self._service: TokenizerService | None = None
        self.activity = Activity()

    def open(self, service: TokenizerService) -> None:
        """Answer calls from now on."""
        self._service = service

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        service = self._ready(request.model)
        size = request.ByteSize()
        _check_count("texts", len(request.texts), service.config.max_batch)
        _check_bytes("texts", size, service.config.max_text_bytes)
        options = convert.encode_options(request)
        texts = list(request.texts)

        def work(tokenizer: TextTokenizer) -> tuple[list[Encoded], pb.EncodeResponse]:
            begin = time.perf_counter()
            encodings = tokenizer.encode(texts, options)
            self._metrics.tokenize_seconds.observe(time.perf_counter() - begin)
            return encodings, convert.encode_response(encodings)

        with self.activity.call(), stage("encode"):
            encodings, response = await service.workers.encode(max(size, _padded(service, request, options)), work)
        self._count("encode", sum(len(encoded.ids) for encoded in encodings), sum(map(len, texts)))
        return _checked(response)

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        service = self._ready(request.model)
        # Pieces are of single ids, which have a bound of their own: a router asks for those of a prompt at once.
        if not request.with_pieces:
            _check_count("sequences", len(request.sequences), service.config.max_batch)
        sequences = [sequence.ids for sequence in request.sequences]
        tokens = sum(map(len, sequences))
        _check_count("sequences", tokens, service.config.max_decode_ids)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        if request.with_pieces and any(len(ids) != 1 for ids in sequences):
            raise InvalidArgument("with_pieces", "each sequence must be one id")

        def work(tokenizer: TextTokenizer) -> pb.DecodeResponse:
            begin = time.perf_counter()
            texts = tokenizer.decode(sequences, skip)
            pieces = [service.detokenizers.piece(ids[0]) for ids in sequences] if request.with_pieces else ()
            if request.without_open_end:
                texts = [
                    service.detokenizers.make(skip).begin(ids) if text.endswith(REPLACEMENT) else text
                    for ids, text in zip(sequences, texts, strict=True)
                ]
            self._metrics.detokenize_seconds.observe(time.perf_counter() - begin)
            return pb.DecodeResponse(texts=texts, pieces=pieces)

        with self.activity.call():
            response = await service.workers.run(request.ByteSize(), work)
        self._count("decode", tokens, sum(map(len, response.texts)))
        return _checked(response)

    async def ApplyChatTemplate(
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        service = self._ready(request.model)
        size = request.ByteSize()
        _check_count("messages", len(request.messages), service.config.max_messages)
        _check_bytes("messages", size, service.config.max_text_bytes)
        with self.activity.call():
            begin = time.perf_counter()
            with stage("render"):
                rendered = await self._render(service, request)
            template_seconds = time.perf_counter() - begin
            self._metrics.template_seconds.observe(template_seconds)
            with stage("encode"):
                response = await service.workers.encode(
                    max(size, len(rendered.text)), lambda tokenizer: _encode_chat(tokenizer, rendered)
                )
        response.template_seconds = template_seconds
        self._metrics.tokenize_seconds.observe(response.tokenize_seconds)
        self._count("chat", len(response.token_ids), len(rendered.text))
        return _checked(response)

    async def DecodeStream(
        self, request_iterator: AsyncIterator[pb.DecodeStreamRequest], context: Context
    ) -> AsyncIterator[pb.DecodeStreamResponse]:
        service = self._ready("")
        session = service.decode_session()
        inline = service.config.inline_decode_bytes if service.detokenizers.kind != "window" else -1
        self._metrics.streams.inc()
        # The number counted before: the session of a cancelled call may still change while a thread works on its
        # message.
        live = 0
        try:
            async for request in request_iterator:
                if request.ByteSize() <= inline:
                    response = session.process(request)
                else:
                    response = await service.workers.run(0, partial(_process, session, request))
                change, live = len(session) - live, len(session)
                self._count_step(session, change, response.detokenize_seconds)
                yield response
        finally:
            self._metrics.streams.dec()
            self._live(-live)

    async def GetDecodeTable(
        self, request: pb.GetDecodeTableRequest, context: Context
    ) -> AsyncIterator[pb.GetDecodeTableResponse]:
        for part in convert.decode_table(self._ready(request.model).detokenizers.table):
            yield part

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> pb.GetTokenizerResponse:
        service = self._ready(request.model)
        vocabulary = service.vocabulary
        response = pb.GetTokenizerResponse(
            model=service.model,
            vocab_size=vocabulary.size,
            eos_token_ids=vocabulary.eos_ids,
            bos_token_id=vocabulary.special_id("bos_token"),
            pad_token_id=vocabulary.special_id("pad_token"),
            unk_token_id=vocabulary.special_id("unk_token"),
            special_token_ids=list(vocabulary.marks.control_tokens),
            chat_template=service.templates.default,
            template_names=service.templates.names,
            tool_template=service.templates.for_tools,
            response_template=vocabulary.bundle.response_template,
            fingerprint=service.fingerprint,
            tokenizer_fingerprint=service.tokenizer_fingerprint,
            model_max_length=vocabulary.bundle.model_max_length,
            hides_tools=service.hides_tools,
        )
        return _checked(response)

    async def _render(self, service: TokenizerService, request: pb.ApplyChatTemplateRequest) -> Rendered:
        wanted = service.templates.request(convert.conversation(request))
        rendered = service.templates.result(wanted, await service.pool.render(wanted))
        _check_bytes("messages", len(rendered.text), MAX_RESPONSE_BYTES)
        return rendered

    def _ready(self, model: str) -> TokenizerService:
        if self._service is None:
            raise Unavailable("the tokenizer is loading", reason="STARTING", retry_after_seconds=0.5)
        if self.activity.draining:
            raise Unavailable("the tokenizer is draining", reason="DRAINING")
        self._service.check_model(model)
        return self._service

    def _count(self, operation: Operation, tokens: int, characters: int) -> None:
        self._metrics.tokens[operation].inc(tokens)
        self._metrics.characters[operation].inc(characters)
        if operation in ("encode", "chat"):
            self._metrics.request_tokens.observe(tokens)

    def _count_step(self, session: DecodeSession, change: int, seconds: float) -> None:
        self._metrics.detokenize_seconds.observe(seconds)
        self._count("decode_stream", session.tokens, session.characters)
        if change:
            self._live(change)

    def _live(self, change: int) -> None:
        self._metrics.sequences.inc(change)
        self.activity.add(change)


def _encode_chat(tokenizer: TextTokenizer, rendered: Rendered) -> pb.ApplyChatTemplateResponse:
    begin = time.perf_counter()
    ids = tokenizer.encode_rendered(rendered.text, rendered.marked)
    seconds = time.perf_counter() - begin
    return pb.ApplyChatTemplateResponse(text=rendered.text, token_ids=ids, tokenize_seconds=seconds)


def _process(session: DecodeSession, request: pb.DecodeStreamRequest, _: TextTokenizer) -> pb.DecodeStreamResponse:
    return session.process(request)


def _padded(service: TokenizerService, request: pb.EncodeRequest, options: EncodeOptions) -> int:
    """Estimate the number of ids that padding makes. Each takes as long as a byte of text."""
    if not options.padding:
        return 0
    limit = options.max_length if options.max_length is not None else service.vocabulary.bundle.model_max_length
    longest = max((len(text.encode()) for text in request.texts), default=0)
    return len(request.texts) * (longest if options.padding == "longest" else limit or 0)


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(field, f"at most {limit} are allowed", reason="TOO_MANY")


def _check_bytes(field: str, size: int, limit: int) -> None:
    if size > limit:
        raise InvalidArgument(field, f"at most {limit} bytes are allowed together", reason="TOO_LARGE")


def _checked(response: M) -> M:
    if response.ByteSize() > MAX_RESPONSE_BYTES:
        raise ResourceExhausted("the answer would be larger than 4 MiB; send less at once", reason="RESPONSE_TOO_LARGE")
    return response


class Activity:
    """Counts of running calls and live sequences. Belongs to the event loop."""

    def __init__(self) -> None:
        self._live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count one call while it runs."""
        self.add(1)
        try:
            yield
        finally:
            self.add(-1)

    def add(self, change: int) -> None:
        """Change the number of live calls and sequences by `change`."""
        self._live += change
        if self._live:
            self._idle.clear()
        else:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new calls; return when nothing is live. Open DecodeStreams may continue until then."""
        self.draining = True
        await self._idle.wait()
