"""Good requests of every call that takes more than a name, drawn at random: where a fuzzer that changes them begins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from factories.engine.mixed import mixed_request, structured, textual
from factories.engine.modes import to_message
from factories.wire.random_messages import CANARY
from penstock.v1 import common_pb2, config_pb2, generation_pb2, graphs_pb2, jobs_pb2, model_pb2, text_pb2, tokenizer_pb2
from penstock_client._tensors import set_rows

# In texts: it may appear in no log, metric or error.
_TEXT = f"one {CANARY} two three"
_ROLES = ("system", "user", "assistant", "user")
# Numbers of a row of embeddings, and the vocabulary: the tiny checkpoints'.
_HIDDEN_SIZE, _VOCAB_SIZE = 48, 4096
# Of a batch.
_ENDPOINT = "/v1/completions"
_EXTRA = {"structured": structured("none"), "textual": textual}


def good_requests(name: str, draw: random.Random) -> list[Any]:
    """Return the messages of a call of the method `name` ("penstock.v1.TextService.Chat"); none for other methods."""
    make = _MAKERS.get(name)
    return make(draw) if make is not None else []


def _ids(draw: random.Random, most: int = 20) -> list[int]:
    return [draw.randrange(3, 300) for _ in range(draw.randint(1, most))]


def _runs(draw: random.Random) -> list[common_pb2.TokenIds]:
    return [common_pb2.TokenIds(ids=_ids(draw)) for _ in range(draw.randint(1, 4))]


def _generate(draw: random.Random) -> generation_pb2.GenerateRequest:
    arguments = mixed_request(draw, _EXTRA)
    arguments.update(draw.choice(({}, {}, {"output_scores": True}, {"prompt_logprobs": 2}, {"top_logprobs": 5})))
    message = to_message(arguments.pop("prompt"), arguments)
    message.request_id = f"{draw.randrange(1 << 60):x}"
    if draw.random() < 0.2:
        _embed(draw, message)
        if not message.inputs_embeds_before_ids:
            del message.prompt_token_ids[:]
    return message


def _embed(draw: random.Random, message: Any) -> None:
    """Give a request a prompt of embeddings, in place of ids or before them."""
    rows = [[draw.uniform(-0.5, 0.5) for _ in range(_HIDDEN_SIZE)] for _ in range(draw.randint(1, 9))]
    set_rows(message.inputs_embeds, rows)
    message.inputs_embeds_before_ids = draw.random() < 0.5


def _text(draw: random.Random, kind: Any) -> Any:
    generate = _generate(draw)
    made = kind(config=generate.config, stop=generate.stop, output=generate.output, cache_salt=generate.cache_salt)
    if generate.HasField("constraint"):
        made.constraint.CopyFrom(generate.constraint)
    if generate.eos_token_ids:
        made.config.eos_token_id[:] = generate.eos_token_ids
    return made


def _generate_text(draw: random.Random) -> list[Any]:
    made = _text(draw, text_pb2.GenerateTextRequest)
    if draw.random() < 0.2:
        _embed(draw, made)
    if made.HasField("inputs_embeds") and not made.inputs_embeds_before_ids:
        return [made]
    if draw.random() < 0.5:
        made.text = _TEXT * draw.randint(1, 4)
    else:
        made.token_ids.ids.extend(_ids(draw))
    return [made]


def _messages(draw: random.Random) -> list[tokenizer_pb2.Message]:
    count = draw.randint(1, len(_ROLES))
    return [tokenizer_pb2.Message(role=role, content=_TEXT) for role in _ROLES[-count:]]


def _chat(draw: random.Random) -> list[Any]:
    made = _text(draw, text_pb2.ChatRequest)
    made.messages.extend(_messages(draw))
    return [made]


def _watermarking(draw: random.Random) -> config_pb2.WatermarkingConfig:
    if draw.random() < 0.5:
        return config_pb2.WatermarkingConfig(greenlist_ratio=0.4, bias=1.5)
    synthid = config_pb2.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 6, 7], context_history_size=4)
    return config_pb2.WatermarkingConfig(synthid=synthid)


def _decode_stream(draw: random.Random) -> list[Any]:
    """Make sequences that open, go on and end on one stream."""
    item, live = tokenizer_pb2.DecodeStreamItem, list(range(draw.randint(1, 5)))
    options = tokenizer_pb2.DecodeStreamOpen(stop_strings=draw.choice(([], ["e", "in"])), prefix_token_ids=_ids(draw))
    begin = [item(stream_id=one, open=options, token_ids=_ids(draw)) for one in live]
    steps = [[item(stream_id=one, token_ids=_ids(draw, 3)) for one in live] for _ in range(draw.randint(0, 3))]
    end = [item(stream_id=one, token_ids=_ids(draw, 3), finish=True) for one in live]
    return [tokenizer_pb2.DecodeStreamRequest(items=items) for items in (begin, *steps, end)]


def _session(draw: random.Random) -> list[Any]:
    requests = [_generate(draw) for _ in range(draw.randint(1, 3))]
    made = [generation_pb2.SessionRequest(submit=one, handle=draw.randrange(3)) for one in requests]
    if draw.random() < 0.3:
        abort = generation_pb2.SessionAbort(request_id=requests[0].request_id)
        made.append(generation_pb2.SessionRequest(abort=abort))
    return made


def _score(draw: random.Random) -> list[Any]:
    item = generation_pb2.ScoreItem
    items = [item(prompt_token_ids=_ids(draw), continuation_token_ids=_ids(draw)) for _ in range(draw.randint(1, 3))]
    return [generation_pb2.ScoreRequest(items=items, top_logprobs=draw.choice((None, 3)))]


def _score_text(draw: random.Random) -> list[Any]:
    items = [text_pb2.ScoreTextItem(prompt=_TEXT, continuation=" four") for _ in range(draw.randint(1, 3))]
    return [text_pb2.ScoreTextRequest(items=items, top_logprobs=draw.choice((None, 3)))]


def _abort(draw: random.Random) -> list[Any]:
    return [generation_pb2.AbortRequest(request_ids=[CANARY, f"{draw.randrange(1 << 60):x}"])]


def _forward(draw: random.Random) -> list[Any]:
    """One stream: a prompt's embedding, and a layer over it in a named sequence, in two messages."""
    ids = _ids(draw)
    embedding = graphs_pb2.ForwardRequest(graph="embedding", call_id=1)
    data = b"".join(one.to_bytes(4, "little") for one in ids)
    embedding.inputs.add(dtype=common_pb2.D_TYPE_INT32, shape=[1, len(ids)], data=data)
    layer = graphs_pb2.ForwardRequest(graph="block_cache_0", call_id=2, sequence=CANARY, more=True)
    rows = bytes(4 * _HIDDEN_SIZE * len(ids))
    layer.inputs.add(dtype=common_pb2.D_TYPE_FLOAT32, shape=[1, len(ids), _HIDDEN_SIZE], data=rows[:64])
    layer.outputs.add(index=0, keep=True)
    rest = graphs_pb2.ForwardRequest(call_id=2)
    rest.inputs.add(data=rows[64:])
    return [embedding, layer, rest]


def _sample(draw: random.Random) -> list[Any]:
    logits = common_pb2.Tensor(
        dtype=common_pb2.D_TYPE_FLOAT32, shape=[1, _VOCAB_SIZE], data=draw.randbytes(2) * (2 * _VOCAB_SIZE)
    )
    message = graphs_pb2.SampleRequest(logits=logits, config=config_pb2.GenerationConfig(top_k=5), top_logprobs=2)
    message.rows.add(prompt_token_ids=_ids(draw), output_token_ids=_ids(draw), seed=draw.randrange(1 << 40))
    return [message]


def _allocate(draw: random.Random) -> list[Any]:
    tensors = [graphs_pb2.TensorSpec(dtype=common_pb2.D_TYPE_FLOAT32, shape=[draw.randint(1, 9), 4])]
    return [graphs_pb2.AllocateTensorsRequest(lease_seconds=1.0, tensors=tensors)]


def _write_weights(draw: random.Random) -> list[Any]:
    """One stream: a norm's weight in two messages."""
    norm = model_pb2.WeightTensor(name="model.norm.weight", dtype=common_pb2.D_TYPE_BFLOAT16, shape=[_HIDDEN_SIZE])
    start, data = model_pb2.WriteWeightsStart(tensors=[norm]), draw.randbytes(1) * (2 * _HIDDEN_SIZE)
    return [
        model_pb2.WriteWeightsRequest(start=start),
        model_pb2.WriteWeightsRequest(chunk=data[:7]),
        model_pb2.WriteWeightsRequest(chunk=data[7:]),
    ]


def _submit_batch(draw: random.Random) -> list[Any]:
    """One stream: a batch, and lines that are cut anywhere."""
    body = {"prompt": _TEXT, "max_tokens": 2}
    line = {"custom_id": CANARY, "method": "POST", "url": _ENDPOINT, "body": body}
    data = "".join(json.dumps({**line, "custom_id": f"{one}"}) + "\n" for one in range(draw.randint(1, 3))).encode()
    cut = draw.randrange(len(data))
    new = jobs_pb2.NewBatch(endpoint=_ENDPOINT, completion_window="1h", metadata={CANARY: CANARY})
    return [
        jobs_pb2.SubmitBatchRequest(batch=new),
        *(jobs_pb2.SubmitBatchRequest(lines=part) for part in (data[:cut], data[cut:])),
    ]


_MAKERS: Mapping[str, Callable[[random.Random], list[Any]]] = {
    "penstock.v1.TextService.Generate": _generate_text,
    "penstock.v1.TextService.Chat": _chat,
    "penstock.v1.TextService.Embed": lambda draw: [text_pb2.EmbedTextRequest(texts=[_TEXT, "four"])],
    "penstock.v1.TextService.Score": _score_text,
    "penstock.v1.TextService.DetectWatermark": lambda draw: [
        text_pb2.DetectWatermarkTextRequest(text=_TEXT * 3, watermarking_config=_watermarking(draw))
    ],
    "penstock.v1.TokenizerService.Encode": lambda draw: [
        tokenizer_pb2.EncodeRequest(texts=[_TEXT, "four"], return_offsets=True)
    ],
    "penstock.v1.TokenizerService.Decode": lambda draw: [tokenizer_pb2.DecodeRequest(sequences=_runs(draw))],
    "penstock.v1.TokenizerService.ApplyChatTemplate": lambda draw: [
        tokenizer_pb2.ApplyChatTemplateRequest(messages=_messages(draw), add_generation_prompt=True)
    ],
    "penstock.v1.TokenizerService.DecodeStream": _decode_stream,
    "penstock.v1.JobsService.SubmitBatch": _submit_batch,
    "penstock.v1.JobsService.ListBatches": lambda draw: [jobs_pb2.ListBatchesRequest(limit=draw.randint(1, 100))],
    "penstock.v1.GenerationService.Generate": lambda draw: [_generate(draw)],
    "penstock.v1.GenerationService.Session": _session,
    "penstock.v1.GenerationService.Score": _score,
    "penstock.v1.GenerationService.Embed": lambda draw: [generation_pb2.EmbedRequest(inputs=_runs(draw))],
    "penstock.v1.GenerationService.DetectWatermark": lambda draw: [
        generation_pb2.DetectWatermarkRequest(
            token_ids=[one for _ in range(6) for one in _ids(draw)], watermarking_config=_watermarking(draw)
        )
    ],
    "penstock.v1.GenerationService.Abort": _abort,
    "penstock.v1.ModelService.Forward": _forward,
    "penstock.v1.ModelService.Sample": _sample,
    "penstock.v1.ModelService.AllocateTensors": _allocate,
    "penstock.v1.ModelService.WriteWeights": _write_weights,
}
