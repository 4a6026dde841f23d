"""One thing of each kind that a gateway keeps, for requests that name it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from factories.wire.plain_http import PlainHttp

BOUNDARY = b"a-boundary"
FORM = b"content-type: multipart/form-data; boundary=" + BOUNDARY


@dataclass(frozen=True)
class MadeThings:
    """Ids of what a gateway keeps."""

    # Second part of a path -> the id of a thing of that kind.
    ids: Mapping[str, str]
    # Of an item of the conversation.
    item_id: str


def target_of(path: str, made: MadeThings) -> bytes:
    """Return the target of a route's path: with the id of what it names."""
    kind = path.split("/")[2] if "{name" in path else ""
    named = path.replace("{name:path}", "{name}").replace("{name}", made.ids.get(kind, ""))
    return named.replace("{item}", made.item_id).encode()


def form_of(*parts: tuple[bytes, bytes]) -> bytes:
    """Return a form of parts, each the rest of its Content-Disposition and its data."""
    lines = [
        b"--%b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (BOUNDARY, head, data) for head, data in parts
    ]
    return b"".join(lines) + b"--%b--\r\n" % BOUNDARY


async def make_things(client: PlainHttp, *, has_files: bool = True) -> MadeThings:
    """Make one thing of each kind; the response was made in the background."""

    async def made(path: bytes, body: Any, *headers: bytes) -> dict[str, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = await client.ask("POST", path, data, *headers)
        assert status == 200, answer
        found: dict[str, Any] = json.loads(answer)
        return found

    hello = {"type": "message", "role": "user", "content": "Hello"}
    response = await made(b"/v1/responses", {"input": "Hello", "max_output_tokens": 1, "background": True})
    while response["status"] in ("queued", "in_progress"):
        response = json.loads((await client.ask("GET", b"/v1/responses/" + response["id"].encode()))[1])
    conversation = await made(b"/v1/conversations", {"items": [hello]})
    items = await client.ask("GET", b"/v1/conversations/%b/items" % conversation["id"].encode())
    ids = {"responses": response["id"], "conversations": conversation["id"], "models": "penstock-demo"}
    if has_files:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
        file = form_of((b'name="purpose"', b"batch"), (b'name="file"; filename="a"', json.dumps(line).encode()))
        ids["files"] = (await made(b"/v1/files", file, FORM))["id"]
        # Of its own: nobody may delete a file while a batch reads it.
        read = (await made(b"/v1/files", file, FORM))["id"]
        order = {"input_file_id": read, "endpoint": "/v1/completions", "completion_window": "24h"}
        ids["batches"] = (await made(b"/v1/batches", order))["id"]
    return MadeThings(ids, json.loads(items[1])["data"][0]["id"])
