"""Routes with one plain answer: models, tokens, templates, embeddings, scores, the list of options."""

from __future__ import annotations

import base64
import enum
import json
import struct
import time
from collections.abc import Iterable
from typing import Any

from penstock_client import LogprobEntry

from penstock.common.errors import InvalidArgument, NotFound
from penstock.common.model_names import those_there_are
from penstock.gateway.answers import dumps, usage_of
from penstock.gateway.anthropic_models import anthropic_model, anthropic_models
from penstock.gateway.chat_history import messages_of
from penstock.gateway.endpoint import Answer, HttpCall
from penstock.gateway.file_routes import query_of
from penstock.gateway.http_errors import known_errors
from penstock.gateway.request_fields import Fields, checked, checked_call, ids_of, tools_of, typed
from penstock.generation.options.request_limits import DEFAULT_LIMITS
from penstock.generation.options.table import SECTIONS

_STARTED = int(time.time())
# transformers' class for any tokenizer.json: what the service reads.
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def _model(model: Any) -> dict[str, Any]:
    state = model.DESCRIPTOR.fields_by_name["state"].enum_type.values_by_number[model.state].name
    shares = [{"model": share.model, "weight": share.weight} for share in model.shares]
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "penstock",
        "root": model.parent or model.name,
        "parent": model.parent or None,
        "max_model_len": model.max_context_tokens,
        "ready": model.backends > 0,
        "state": state.removeprefix("MODEL_STATE_").lower(),
        "percent_loaded": model.percent_loaded,
        **({"shares": shares} if shares else {}),
    }


async def list_models(call: HttpCall) -> Answer:
    """Answer `/v1/models`: models and adapters. Raises InvalidArgument for a page of Anthropic's list."""
    models = await call.client.list_models()
    if call.is_anthropic:
        return dumps(anthropic_models([model.name for model in models], call.query))
    return dumps({"object": "list", "data": [_model(model) for model in models]})


async def get_model(call: HttpCall) -> Answer:
    """Answer `/v1/models/NAME`. Raises NotFound."""
    models = await call.client.list_models()
    for model in models:
        if model.name == call.tail:
            return dumps(anthropic_model(model.name) if call.is_anthropic else _model(model))
    names = those_there_are(model.name for model in models)
    raise NotFound(f"no model or adapter of this name; {names}", reason="MODEL_NOT_FOUND", field="model")


async def embeddings(call: HttpCall) -> Answer:
    """Answer `/v1/embeddings`. Raises InvalidArgument for ids: the router embeds only text."""
    fields = Fields(call)
    given = fields.raw("input")
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        raise InvalidArgument("input", "must be a text or a list of texts")
    call.names["texts"] = "input"
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidArgument(f"input[{number}]", "must be a text; token ids are not supported")
    form = fields.get("encoding_format", str, "float")
    if form not in ("float", "base64"):
        raise InvalidArgument("encoding_format", "must be float or base64")
    if fields.raw("dimensions") is not None:
        raise InvalidArgument("dimensions", "is not supported: a vector has the model's hidden size")
    normalize, model = fields.get("normalize", bool, True), fields.get("model", str, "")
    adapter = fields.get("adapter", str, "")
    fields.done()
    answer = await call.client.embed(
        texts, normalize=normalize, model=model, adapter=adapter, timeout=call.config.answer_seconds
    )
    call.tokens.add([answer.usage])
    usage = usage_of([answer.usage])
    return dumps(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": number, "embedding": _vector(vector, form)}
                for number, vector in enumerate(answer.vectors)
            ],
            "model": model or await _only_model(call),
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }
    )


def _vector(vector: tuple[float, ...], form: str) -> Any:
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def _only_model(call: HttpCall) -> str:
    return str((await call.client.get_model()).name)


async def score(call: HttpCall) -> Answer:
    """Answer `/v1/score`: log-probabilities of continuations after prompts."""
    fields = Fields(call)
    items = [
        (typed(item.get("prompt", ""), str, f"{at}.prompt"), typed(item.get("continuation"), str, f"{at}.continuation"))
        for number, item in enumerate(fields.get("items", list, []))
        for at in (f"items[{number}]",)
        if typed(item, dict, at) is item
    ]
    if "prompt" in fields or "continuation" in fields:
        prompt = fields.get("prompt", str, "")
        given = fields.raw("continuation")
        continuations = given if isinstance(given, list) else [given]
        for one in continuations:
            if not isinstance(one, str):
                raise InvalidArgument("continuation", "must be a text or a list of texts")
            items.append((prompt, one))
    if not items:
        raise InvalidArgument("items", "must be a list of objects with prompt and continuation")
    top, model = fields.maybe("top_logprobs", int), fields.get("model", str, "")
    adapter = fields.get("adapter", str, "")
    fields.done()
    scores = await checked_call(
        call.client.score(items, top_logprobs=top, model=model, adapter=adapter, timeout=call.config.answer_seconds),
        number="top_logprobs",
    )
    call.tokens.add([scores.usage])
    usage = usage_of([scores.usage])
    return dumps(
        {
            "object": "list",
            "data": [
                {
                    "index": number,
                    "object": "score",
                    "score": one.logprob,
                    "is_greedy": one.is_greedy,
                    "tokens": [_score_token(token) for token in one.tokens],
                }
                for number, one in enumerate(scores.scores)
            ],
            "model": model or await _only_model(call),
            "usage": {name: usage[name] for name in ("prompt_tokens", "total_tokens")},
        }
    )


def _score_token(entry: LogprobEntry) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "bytes": list(entry.token_bytes),
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [_score_token(other) for other in entry.top],
    }


def _plain(value: Any) -> Any:
    """A value of the table in JSON; words if JSON has no such value."""
    if isinstance(value, enum.Enum):
        return value.value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _choices(hint: str) -> list[Any] | None:
    """All values of a type with few values; None for other types."""
    parts = hint.split(" | ")
    if hint == "bool" or not all(part == "bool" or part.startswith("Literal[") for part in parts):
        return None
    values = ([True, False] if part == "bool" else json.loads(part.removeprefix("Literal")) for part in parts)
    return [value for some in values for value in some]


def _rows() -> Iterable[dict[str, Any]]:
    for section, specs in SECTIONS.items():
        for name, spec in specs.items():
            bounds = spec.bounds
            yield {
                "name": spec.oneof if spec.oneof and spec.router_only else name,
                "section": section,
                "kind": spec.kind.form if spec.kind.form != "plain" else spec.kind.hint,
                "type": spec.kind.hint,
                "doc": spec.doc,
                "minimum": None if bounds is None else bounds.low,
                "maximum": None if bounds is None else bounds.high,
                "minimum_excluded": bounds is not None and bounds.above,
                "maximum_excluded": bounds is not None and bounds.below,
                "most": getattr(DEFAULT_LIMITS, spec.limit) if spec.limit else None,
                "default": _plain(spec.default),
                "allowed": spec.allowed,
                "choices": _choices(spec.kind.hint),
                "effect": spec.effect,
                "group": spec.flags,
            }


# Made once: the table does not change while the process runs.
OPTIONS_JSON = json.dumps({"object": "list", "data": list(_rows())}, ensure_ascii=False).encode()


async def list_options(call: HttpCall) -> Answer:
    """Answer `/options`: every option of generate() that a request may carry."""
    return OPTIONS_JSON


async def tokenize(call: HttpCall) -> Answer:
    """Answer `/tokenize`: the ids of a text, or of a conversation rendered by its template."""
    fields = Fields(call)
    model = fields.get("model", str, "")
    if "messages" in fields:
        _, ids = await _rendered(fields, call, model)
    else:
        prompt = fields.raw("prompt") if "prompt" in fields else fields.raw("content")
        special = fields.get("add_special_tokens", bool, True)
        fields.done()
        found = await call.client.tokenize(
            [typed(prompt, str, "prompt")],
            add_special_tokens=special,
            model=model,
            timeout=call.config.answer_seconds,
        )
        ids = found[0]
    facts = await call.client.get_model(model)
    return dumps({"tokens": ids, "count": len(ids), "max_model_len": facts.max_context_tokens})


async def tokenizer_info(call: HttpCall) -> Answer:
    """Answer `/tokenizer_info` in vLLM's form: special tokens as texts, and chat templates. Raises NotFound."""
    model = query_of(call).get("model", "")
    try:
        facts = await known_errors(call.client.get_tokenizer(model))
    except NotFound as error:
        # The router's call has it as `name`.
        message = f"model: {error.message.removeprefix('name: ')}"
        raise NotFound(message, reason=error.reason, field="model") from None
    ids = {
        "bos_token": facts.bos_token_id if facts.HasField("bos_token_id") else None,
        "eos_token": facts.eos_token_ids[0] if facts.eos_token_ids else None,
        "pad_token": facts.pad_token_id if facts.HasField("pad_token_id") else None,
        "unk_token": facts.unk_token_id if facts.HasField("unk_token_id") else None,
    }
    known = {name: number for name, number in ids.items() if number is not None}
    texts = await call.client.detokenize(
        [[number] for number in known.values()],
        skip_special_tokens=False,
        model=model,
        timeout=call.config.answer_seconds,
    )
    template: Any = facts.chat_template or None
    if facts.tool_template:
        template = {"default": facts.chat_template, "tool_use": facts.tool_template}
    return dumps(
        {
            "tokenizer_class": _TOKENIZER_CLASS,
            **dict.fromkeys(ids),
            **dict(zip(known, texts, strict=True)),
            **{f"{name}_id": number for name, number in ids.items()},
            "eos_token_ids": list(facts.eos_token_ids),
            "chat_template": template,
            "model_max_length": facts.model_max_length if facts.HasField("model_max_length") else None,
            "vocab_size": facts.vocab_size,
            "fingerprint": facts.tokenizer_fingerprint,
        }
    )


async def detokenize(call: HttpCall) -> Answer:
    """Answer `/detokenize`: the text of ids."""
    fields = Fields(call)
    given = fields.raw("tokens")
    if not isinstance(given, list):
        raise InvalidArgument("tokens", "must be a list of token ids")
    call.names["sequences"] = "tokens"
    ids = ids_of(given, "tokens")
    skip, model = fields.get("skip_special_tokens", bool, False), fields.get("model", str, "")
    fields.done()
    (text,) = await call.client.detokenize(
        [ids], skip_special_tokens=skip, model=model, timeout=call.config.answer_seconds
    )
    return dumps({"prompt": text, "content": text})


async def apply_template(call: HttpCall) -> Answer:
    """Answer `/apply-template`: the prompt made from a conversation."""
    fields = Fields(call)
    text, ids = await _rendered(fields, call, fields.get("model", str, ""))
    return dumps({"prompt": text, "tokens": ids})


async def _rendered(fields: Fields, call: HttpCall, model: str) -> tuple[str, list[int]]:
    messages, tools = messages_of(fields.raw("messages"), call), tools_of(fields.raw("tools"))
    documents = fields.get("documents", list, [])
    variables = fields.get("chat_template_kwargs", dict, {})
    options: dict[str, Any] = {"model": model}
    for name in ("add_generation_prompt", "continue_final_message"):
        options[name] = fields.maybe(name, bool)
    fields.done()
    work = checked(
        options,
        lambda: call.client.render_chat(
            messages,
            tools=tools,
            documents=documents,
            chat_template_kwargs=variables or None,
            timeout=call.config.answer_seconds,
            **options,
        ),
    )
    found: tuple[str, list[int]] = await checked_call(work)
    return found
