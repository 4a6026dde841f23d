"""The chat page's files as they are sent, and what they may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.gateway.chat_page import FOLDER, page_routes, read_page
from starlette.applications import Starlette
from starlette.testclient import TestClient

MODULES = sorted(FOLDER.rglob("*.mjs"))
NODE_TESTS = sorted(Path(__file__).with_name("page").glob("*.test.mjs"))
# All of it, uncompressed; a page without a build step stays one that can be read.
MOST_BYTES = 160_000


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(Starlette(routes=page_routes())) as running:
        yield running


def test_the_root_is_the_page(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Penstock</title>" in answer.text


def test_every_file_that_the_page_names_is_sent(client: TestClient) -> None:
    named = set(re.findall(r'(?:href|src)="(page/[^"]+)"', client.get("/").text))
    assert {"page/main.mjs", "page/icon.svg", "page/style/base.css"} <= named
    assert {name: client.get(f"/{name}").status_code for name in named} == dict.fromkeys(named, 200)


def test_modules_import_files_of_the_page_only() -> None:
    files = read_page()
    for path in MODULES:
        for target in re.findall(r'^import .*? from "([^"]+)";$', path.read_text(), re.MULTILINE):
            assert target.startswith("."), (path, target)
            assert (path.parent / target).resolve().relative_to(FOLDER).as_posix() in files


def test_modules_have_a_type_that_browsers_run(client: TestClient) -> None:
    answer = client.get("/page/main.mjs")
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_policy_allows_scripts_of_this_origin_only(client: TestClient) -> None:
    policy = client.get("/").headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy


def test_a_file_that_is_known_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/main.mjs")
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f"W/{first.headers['etag']}", f'"other", {first.headers["etag"]}', "*"):
        again = client.get("/page/main.mjs", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert client.get("/page/main.mjs", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/", "/page/../chat_page.py", "/page/%2e%2e/chat_page.py", "/page/index.html"])
def test_nothing_else_is_sent(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_is_read_and_not_written_to(client: TestClient) -> None:
    assert client.head("/").status_code == 200
    assert client.post("/").status_code == 405


def test_no_module_makes_html_of_text() -> None:
    for path in MODULES:
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", path.read_text()
        ), path


def test_nothing_is_inline_and_nothing_comes_from_elsewhere() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=|https?://", index)
    for path in FOLDER.rglob("*.css"):
        assert "url(" not in path.read_text()


def test_the_page_is_small() -> None:
    assert sum(len(file.content) for file in read_page().values()) < MOST_BYTES


def test_modules_do_as_their_own_tests_say() -> None:
    """Markdown, requests, options and conversations, in node."""
    if shutil.which("node") is None:
        pytest.skip("no node")
    done = subprocess.run(["node", "--test", *map(str, NODE_TESTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
