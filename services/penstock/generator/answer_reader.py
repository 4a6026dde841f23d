"""The engine's events of one request as deltas and as a whole answer: the client's own types, made in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from penstock_client._score_embed import embeddings_of, scores_of
from penstock_client._tensors import StepTensors, step_tensors
from penstock_client._types import Choice, Completion, Delta, Embeddings, LogprobEntry, Scores, ToolCall

from penstock.common.errors import Internal
from penstock.generation.core.request import (
    Emission,
    FinishedOutput,
    FinishReason,
    ItemResult,
    Logprob,
    PositionLogprobs,
    Request,
    SequenceFinish,
    StartedOutput,
)
from penstock.generation.wire.convert import Event, fill_started, fill_tensors, from_finished
from penstock.generation.wire.score_embed_messages import from_embeddings, from_scores
from penstock.generator.requests import LocalRequest
from penstock.generator.text import LocalTokenizer
from penstock.router.chat.chat_output import ChatParser, ChatPiece
from penstock.router.chat.prompt_thought import to_thought
from penstock.router.chat.reasoning_tokens import ReasoningTokens
from penstock.text.text_decoder import TextDecoder
from penstock.v1 import common_pb2, generation_pb2, text_pb2

# Ends after which a chat that ended in calls ended by them.
_ENDED_BY_MODEL = (
    FinishReason.STOP_EOS,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.CONSTRAINT_DONE,
)
# Ends that cut no call in half.
_NOT_CUT = (FinishReason.STOP_EOS, FinishReason.STOP_TOKEN, FinishReason.CONSTRAINT_DONE)


class AnswerReader:
    """Reader of one request's events. Used by one thread at a time."""

    def __init__(self, request: LocalRequest, tokenizer: LocalTokenizer | None, model: str) -> None:
        """`tokenizer` None: answers have ids and no text. `model` is the name that Started tells."""
        self._request = request
        self._tokenizer = tokenizer
        self._model = model
        self._started: generation_pb2.Started | None = None
        self._finished: generation_pb2.Finished | None = None
        self._choices: dict[int, Choice] = {}
        self._decoders: dict[int, TextDecoder] = {}
        self._parsers: dict[int, ChatParser] = {}
        self._reasoning: dict[int, ReasoningTokens] = {}
        self._next_seq = 0

    @property
    def is_over(self) -> bool:
        """True once the last event was read."""
        return self._finished is not None

    def read(self, request: Request, event: Event) -> Delta | None:
        """Take the next event; the Delta in it, if it is one. Raises Internal for ids that are no text."""
        if isinstance(event, Emission):
            return self._on_tokens(event)
        if isinstance(event, StartedOutput):
            self._started = generation_pb2.Started()
            fill_started(self._started, request, self._model, event)
            self._name_tokens(self._started.prompt_logprobs)
        else:
            self._on_finished(event)
        return None

    def completion(self) -> Completion:
        """Return the whole answer. Raises Internal before the last event."""
        if self._started is None or self._finished is None:
            raise Internal("the answer is not complete", reason="INTERNAL")
        return Completion(tuple(self._choices[index] for index in sorted(self._choices)), self._started, self._finished)

    def _on_tokens(self, emission: Emission) -> Delta:
        choice = self._choices.get(emission.index)
        is_first = choice is None
        if choice is None:
            choice = self._choices[emission.index] = Choice(emission.index)
        piece = self._piece(emission, is_first=is_first)
        calls = tuple(ToolCall(call.index, call.call_id, call.name, call.arguments) for call in piece.tool_calls)
        logprobs = tuple(map(self._entry, emission.logprobs))
        delta = Delta(
            self._next_seq,
            emission.index,
            piece.text,
            piece.reasoning,
            calls,
            emission.token_ids,
            logprobs,
            _tensors(emission),
        )
        self._next_seq += 1
        choice.text += piece.text
        choice.reasoning += piece.reasoning
        choice.token_ids.extend(emission.token_ids)
        choice.logprobs.extend(logprobs)
        choice.tensors.extend(delta.tensors)
        for call in calls:
            _collect_call(choice, call)
        return delta

    def _piece(self, emission: Emission, *, is_first: bool) -> ChatPiece:
        """Return the text of the tokens, taken apart where it is a chat's."""
        text = self._text(emission)
        parser = self._parsers.get(emission.index)
        if is_first:
            healed = "" if self._started is None else self._started.healed_text
            text = self._request.echo + healed + text
            parser = self._request.parser()
            if parser is not None:
                self._parsers[emission.index] = parser
        if parser is None:
            return ChatPiece(text)
        counter = self._reasoning.setdefault(emission.index, ReasoningTokens())
        piece = counter.feed(parser, text, len(emission.token_ids))
        if emission.finish is not None:
            reason = emission.finish.reason
            rest = parser.finish(is_cut=reason not in _NOT_CUT, is_stopped=reason is FinishReason.STOP_STRING)
            counter.decide(rest)
            piece.text += rest.text
            piece.reasoning += rest.reasoning
            piece.tool_calls += rest.tool_calls
        return piece

    def _text(self, emission: Emission) -> str:
        if self._tokenizer is None:
            return ""
        request = self._request
        try:
            decoder = self._decoders.get(emission.index)
            if decoder is None:
                decoder = self._decoders[emission.index] = self._tokenizer.decoder(
                    request.context,
                    request.stop_strings,
                    skip_special=request.skip_special,
                    include_stop=request.include_stop,
                    kept=request.kept_tokens,
                    thought=None if request.thought is None else to_thought(request.thought),
                )
            text = decoder.push(emission.token_ids)
        except IndexError:
            raise Internal("the answer could not be turned into text", reason="DETOKENIZE_FAILED") from None
        if emission.finish is not None:
            return decoder.finish(text, emission.finish.stop_string).text
        return text if decoder.stops is None else decoder.stops.push(text).text

    def _entry(self, position: PositionLogprobs) -> LogprobEntry:
        top = tuple(self._logprob(one) for one in position.top)
        return self._logprob(position.chosen or Logprob(0, 0.0, 0), top)

    def _logprob(self, one: Logprob, top: tuple[LogprobEntry, ...] = ()) -> LogprobEntry:
        text, raw = ("", b"") if self._tokenizer is None else self._tokenizer.token_text(one.token_id)
        return LogprobEntry(one.token_id, text, one.logprob, one.rank, top, raw)

    def _name_tokens(self, positions: Iterable[common_pb2.PositionLogprobs]) -> None:
        """Fill in the texts of a prompt's log-probabilities."""
        if self._tokenizer is None:
            return
        for position in positions:
            entries = [*position.top, *([position.chosen] if position.HasField("chosen") else [])]
            for entry in entries:
                entry.text, entry.raw = self._tokenizer.token_text(entry.token_id)

    def _on_finished(self, finished: FinishedOutput) -> None:
        ends = tuple(self._end(finish) for finish in finished.sequences)
        last_seq = self._next_seq - 1 if self._next_seq else None
        self._finished = from_finished(replace(finished, sequences=ends, last_seq=last_seq))
        self._finished.usage.reasoning_tokens = sum(one.total for one in self._reasoning.values())
        for finish in ends:
            choice = self._choices.setdefault(finish.index, Choice(finish.index))
            choice.finish_reason = finish.reason.name
            choice.stop_string, choice.stop_token_id = finish.stop_string, finish.stop_token_id
            choice.cumulative_logprob = finish.cumulative_logprob

    def _end(self, finish: SequenceFinish) -> SequenceFinish:
        parser = self._parsers.get(finish.index)
        if parser is not None and parser.ends_in_tool_calls and finish.reason in _ENDED_BY_MODEL:
            return replace(finish, reason=FinishReason.TOOL_CALLS)
        return finish


def scores_of_items(results: Sequence[ItemResult], tokenizer: LocalTokenizer | None) -> Scores:
    """Return a Score for each item. Raises Internal when the model gave no numbers."""
    response = from_scores(results)
    if tokenizer is not None:
        for result in response.results:
            for position in result.logprobs:
                for entry in (position.chosen, *position.top):
                    entry.text, entry.raw = tokenizer.token_text(entry.token_id)
    return scores_of(text_pb2.ScoreTextResponse(results=response.results, usage=response.usage))


def embeddings_of_items(results: Sequence[ItemResult], *, normalize: bool) -> Embeddings:
    """Return a vector for each input. Raises Internal when the model gave no numbers."""
    response = from_embeddings(results, normalize=normalize)
    return embeddings_of(text_pb2.EmbedTextResponse(embeddings=response.embeddings, usage=response.usage))


def _collect_call(choice: Choice, piece: ToolCall) -> None:
    """Add a piece of a call to the call that it belongs to."""
    if piece.index >= len(choice.tool_calls):
        choice.tool_calls.append(piece)
        return
    known = choice.tool_calls[piece.index]
    choice.tool_calls[piece.index] = ToolCall(
        known.index, known.id or piece.id, known.name + piece.name, known.arguments + piece.arguments
    )


def _tensors(emission: Emission) -> tuple[StepTensors, ...]:
    if not emission.tensors:
        return ()
    delta = generation_pb2.TokenDelta()
    fill_tensors(delta.tensors, emission.tensors)
    return tuple(map(step_tensors, delta.tensors))
