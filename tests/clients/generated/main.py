"""penstock-client, as it is installed: `python main.py ADDRESS VECTORS`. See the README beside this file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from google.rpc import status_pb2
from penstock.common.errors import InvalidArgument, from_status
from penstock.v1 import text_pb2
from penstock_client import Client, PenstockError
from penstock_client._state import StreamState
from penstock_client.config import RetryConfig


def stream(messages: list[bytes]) -> dict[str, str]:
    state = StreamState(RetryConfig())
    try:
        for message in messages:
            state.feed(text_pb2.ChatResponse.FromString(message))
        completion = state.completion()
    except PenstockError as error:
        return {"error": error.reason}
    seen = {}
    for choice in completion.choices:
        stop = choice.stop_string if choice.stop_string is not None else choice.stop_token_id
        values = {
            "text": choice.text,
            "reasoning": choice.reasoning,
            "ids": ",".join(map(str, choice.token_ids)),
            "tools": "\n".join(f"{call.id}|{call.name}|{call.arguments}" for call in choice.tool_calls),
            "finish": choice.finish_reason,
            "stop": "" if stop is None else str(stop),
            "count": str(completion.finished.sequences[choice.index].token_count),
        }
        seen.update({f"{key}.{choice.index}": value for key, value in values.items()})
    return seen


def request(messages: list[bytes]) -> dict[str, str]:
    first = text_pb2.ChatRequest.FromString(messages[0])
    again = text_pb2.ChatRequest.FromString(first.SerializeToString())
    config = again.config

    def told(name: str, form: str = "{}") -> str:
        return form.format(getattr(config, name)).lower() if config.HasField(name) else "unset"

    return {
        "content": again.messages[0].content if again.messages else "",
        "temperature": told("temperature", "{:g}"),
        "top_k": told("top_k"),
        "do_sample": told("do_sample"),
        "seed": told("seed"),
    }


def error(messages: list[bytes]) -> dict[str, str]:
    status = status_pb2.Status.FromString(messages[0])
    made = from_status(status)
    bad = made.description if isinstance(made, InvalidArgument) else ""
    if made.field and not bad:
        bad = made.message.removeprefix(f"{made.field}: ")
    retry = made.retry_after_seconds
    return {
        "code": str(made.code.value[0]),
        "message": made.message,
        "reason": made.reason,
        "field": made.field or "",
        "description": bad,
        "retry_ms": "" if retry is None else str(round(retry * 1000)),
    }


def main() -> None:
    address, path = sys.argv[1:]
    kinds: dict[str, Any] = {"stream": stream, "request": request, "error": error}
    for vector in json.loads(Path(path).read_text(encoding="utf-8"))["vectors"]:
        seen = kinds[vector["kind"]]([bytes.fromhex(message) for message in vector["messages"]])
        expect = vector["expect"]
        wrong = sorted(key for key in seen.keys() | expect.keys() if seen.get(key, "") != expect.get(key, ""))
        print("vector", vector["name"], f"wrong {wrong[0]} {seen.get(wrong[0], '')}" if wrong else "ok")
    with Client(address) as client:
        print(
            "chat",
            client.generate([{"role": "user", "content": "What is Penstock?"}], max_new_tokens=64).text.encode().hex(),
        )
        try:
            client.generate([{"role": "user", "content": "What is Penstock?"}], max_new_tokens=0)
        except PenstockError as refused:
            print("error", refused.field)


if __name__ == "__main__":
    main()
