"""A gateway on a full disk: who writes is told so, who reads is answered, and all goes on once there is room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from factories.full_disk import full_disk
from factories.servers.gateway import running_gateway
from factories.servers.router import backend, running_router
from factories.wire.made_things import FORM, form_of
from factories.wire.plain_http import PlainHttp

pytest.importorskip("python_multipart")
ANSWER: dict[str, Any] = {"input": "Hello", "max_output_tokens": 2}
ITEM = {"type": "message", "role": "user", "content": "x" * 5000}
FILE = form_of((b'name="purpose"', b"batch"), (b'name="file"; filename="a"', b"{}" + b" " * 5000))


async def test_what_writes_is_refused_and_what_reads_is_answered(tmp_path: Path) -> None:
    kept, jobs = tmp_path / "kept", tmp_path / "jobs"
    async with (
        backend() as one,
        running_router(one) as router,
        running_gateway(router.server.address, response_store=str(kept), job_store=str(jobs)) as gateway,
        PlainHttp(*gateway.host_port) as client,
    ):

        async def ask(method: str, path: str, body: Any = None, *headers: bytes) -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
            status, answer = await client.ask(method, path.encode(), data, *headers)
            found = json.loads(answer)
            return status, found["error"]["reason"] if "error" in found and status != 200 else found

        async def made(path: str, body: Any, *headers: bytes) -> str:
            status, found = await ask("POST", path, body, *headers)
            assert status == 200, found
            return str(found["id"])

        response = await made("/v1/responses", {**ANSWER, "input": "x" * 5000})
        conversation = await made("/v1/conversations", {"items": [ITEM]})
        file = await made("/v1/files", FILE, FORM)
        writes: list[tuple[str, str, Any, tuple[bytes, ...]]] = [
            ("POST", "/v1/conversations", {"items": [ITEM]}, ()),
            ("POST", f"/v1/conversations/{conversation}", {"metadata": {"a": "b"}}, ()),
            ("POST", f"/v1/conversations/{conversation}/items", {"items": [ITEM]}, ()),
            ("DELETE", f"/v1/conversations/{conversation}", None, ()),
            ("DELETE", f"/v1/responses/{response}", None, ()),
            ("POST", "/v1/files", FILE, (FORM,)),
            ("POST", "/v1/batches", {"input_file_id": file, "endpoint": "/v1/completions"}, ()),
            ("DELETE", f"/v1/files/{file}", None, ()),
        ]
        reads = [
            f"/v1/responses/{response}",
            f"/v1/responses/{response}/input_items",
            f"/v1/conversations/{conversation}",
            f"/v1/conversations/{conversation}/items",
            f"/v1/files/{file}",
            "/v1/files",
            "/v1/batches",
        ]
        logs = [place.with_name(f"{place.name}-wal") for place in (kept, jobs / "jobs.sqlite")]
        before = [await ask("GET", path) for path in reads]
        with structlog.testing.capture_logs() as lines, full_disk(kept, jobs / "jobs.sqlite", *logs):
            # Two databases, and one bound: the smaller fills its room first.
            filled = [0, 0]
            for store, (_, path, body, headers) in ((0, writes[0]), (1, writes[5])):
                while (await ask("POST", path, body, *headers))[0] == 200:
                    filled[store] += 1
            for method, path, body, headers in writes:
                reason = "JOB_STORE_DOWN" if "files" in path or "batches" in path else "RESPONSE_STORE_DOWN"
                assert await ask(method, path, body, *headers) == (503, reason), path
            # An answer is given, and not kept.
            status, found = await ask("POST", "/v1/responses", {**ANSWER, "input": "x" * 5000})
            assert (status, found["store"]) == (200, False)
            for path, was in zip(reads, before, strict=True):
                status, found = await ask("GET", path)
                assert status == 200, path
                assert path in ("/v1/files", "/v1/batches") or (status, found) == was
        assert not [line for line in lines if line["log_level"] == "critical" or "exception" in line]
        count = len((await ask("GET", "/v1/files"))[1]["data"])
        assert count == 1 + filled[1]
        for method, path, body, headers in writes[:3] + writes[5:6] + writes[4:5] + writes[3:4] + writes[7:]:
            assert (await ask(method, path, body, *headers))[0] == 200, path
        assert len((await ask("GET", "/v1/files"))[1]["data"]) == count
        # A batch is made after all.
        again = await made("/v1/files", FILE, FORM)
        assert await made("/v1/batches", {"input_file_id": again, "endpoint": "/v1/completions"})
