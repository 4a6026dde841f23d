"""The chat page at `/`: files of the package, with validators and a policy that lets nothing else run.

The files are public even if the server wants tokens: they hold only code. The page gets all its data from the API with
the reader's own token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts and styles of this origin only, none inline; no page may frame it; the DOM does not parse text as HTML.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Cached, and revalidated by its tag: an update shows at once.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page in the form that is sent."""

    content: bytes
    media_type: str
    tag: str


def read_page(folder: Path = FOLDER) -> Mapping[str, PageFile]:
    """Read the page's files: path below `folder`, with slashes -> file."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(folder).as_posix(): _page_file(path) for path in paths}


def _page_file(path: Path) -> PageFile:
    content = path.read_bytes()
    return PageFile(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def page_routes(files: Mapping[str, PageFile] | None = None) -> list[Route]:
    """Make the routes of the page: `/`, and one below `/page/` for each file. No other path is looked up."""
    files = read_page() if files is None else files
    routes = [Route(f"/page/{name}", _sender(file)) for name, file in files.items() if name != _INDEX]
    return [Route("/", _sender(files[_INDEX])), *routes]


def _sender(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "etag": file.tag}

    async def send(request: Request) -> Response:
        if _is_known(request.headers.get("if-none-match", ""), file.tag):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return send


def _is_known(header: str, tag: str) -> bool:
    """True when `If-None-Match` has the tag, weak or not (a proxy that compresses makes it weak)."""
    return header.strip() == "*" or tag in (one.strip().removeprefix("W/") for one in header.split(","))
