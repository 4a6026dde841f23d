"""Chat templates that leave tools out: told at load, in the answer's warnings and by `penstock inspect`."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from factories.servers import stack
from factories.servers.gateway import Gateway, running_gateway
from factories.servers.router import backend, running_router
from penstock.cli.inspect_model import inspect_model, run_inspect
from penstock.common.checkpoint import demo_folder
from penstock.tokenizer.config import TokenizerConfig
from penstock.tokenizer.tools_shown import folder_hides_tools

SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def folder_with(folder: Path, template: str) -> Path:
    shutil.copytree(demo_folder(), folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(template)
    return folder


async def test_a_template_that_does_not_render_tells_nothing(tmp_path: Path) -> None:
    assert await folder_hides_tools(folder_with(tmp_path, "{{ broken"), TokenizerConfig()) is None


def test_inspect_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_with(tmp_path, SHOWN)
    assert inspect_model(str(folder), measures=False)["template_shows_tools"] is False
    assert inspect_model(None, measures=False)["template_shows_tools"] is True
    run_inspect(str(folder), {"measure": "false"})
    assert "yes, without tools" in capsys.readouterr().out


async def test_answers_warn_where_tools_are_offered(tmp_path: Path) -> None:
    process = stack.start("tokenizer", "--model", str(folder_with(tmp_path, SHOWN)))
    try:
        stack.wait_serving(process.address, process)
        assert "does not show tools" in process.output()
        async with (
            backend() as served,
            running_router(served, tokenizer=process.address) as router,
            running_gateway(router.server.address) as gateway,
        ):
            assert await warnings(gateway) == []
            assert await warnings(gateway, tools=[TOOL], tool_choice="none") == []
            (told,) = await warnings(gateway, tools=[TOOL])
            assert "chat template does not show tools" in told
            (forced,) = await warnings(gateway, tools=[TOOL], tool_choice="required")
            assert "guesses" in forced
    finally:
        process.kill()


async def test_answers_of_a_template_that_shows_tools_do_not_warn() -> None:
    async with (
        backend() as served,
        running_router(served) as router,
        running_gateway(router.server.address) as gateway,
    ):
        assert await warnings(gateway, tools=[TOOL]) == []


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def warnings(gateway: Gateway, **fields: Any) -> list[str]:
    """Warnings of a chat's answer."""
    body = {"model": "", "messages": [{"role": "user", "content": "?"}], **fields}
    request = urllib.request.Request(f"{gateway.url}/chat/completions", json.dumps(body).encode())

    def send() -> list[str]:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: list[str] = json.load(answer)["penstock"]["warnings"]
            return found

    return await asyncio.to_thread(send)
