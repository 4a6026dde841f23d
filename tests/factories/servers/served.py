"""Whole tree of processes with the gateway, asked over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import openai


class Served:
    """A whole tree of processes, by HTTP and by gRPC."""

    def __init__(self, http: str, grpc: str) -> None:
        self.root, self.grpc = f"http://{http}", grpc
        self.client = openai.OpenAI(base_url=f"{self.root}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one request: POST where it has a body."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.root + path, data), timeout=120) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    def json(self, path: str, body: Any = None) -> Any:
        """The answer's object; the request must succeed."""
        status, _, text = self.ask(path, body)
        assert status == 200, text
        return json.loads(text)

    def events(self, path: str, body: Any) -> list[Any]:
        """Objects of a stream, which ends in [DONE]."""
        status, headers, text = self.ask(path, {**body, "stream": True})
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        lines = [line for line in text.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
