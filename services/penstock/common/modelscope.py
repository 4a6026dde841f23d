"""Download of a model from ModelScope by its HTTP API, into the layout of its own library's cache.

An incomplete file has the suffix `.part`: the next try requests the rest by a range.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.common.environment import current_environment
from penstock.common.errors import StartupError
from penstock.common.progress import DOWNLOAD, ProgressStage, ShowProgress

DEFAULT_REVISION = "master"
DEFAULT_URL = "https://www.modelscope.cn"
# Checksums of the files when they came, for a later check without the hub.
CHECKSUMS = ".penstock-checksums.json"
_PIECE = 1 << 20
_SECONDS = 30.0
# Tries in a row without a further byte.
_MOST_TRIES = 5
_FIRST_WAIT_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository: path, bytes, and SHA-256 in lower-case hex (empty if the hub has none)."""

    path: str
    size: int
    sha256: str


def modelscope_folder(repo: str) -> Path:
    """Return the folder of a model in the library's cache (MODELSCOPE_CACHE)."""
    root = current_environment().get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub"
    owner, _, name = repo.partition("/")
    return Path(root).expanduser() / "models" / owner / name.replace(".", "___")


def download(
    repo: str, revision: str, choose: Callable[[Iterable[str]], list[str]], show: ShowProgress, *, url: str | None
) -> Path:
    """Return the folder with the files of `repo` that `choose` selects by name, after downloading the missing ones.

    An existing file of the right size stays. `url`: the hub's address (default: MODELSCOPE_DOMAIN's). Raises
    StartupError naming MODEL.
    """
    hub = url or _default_url()
    files = {file.path: file for file in list_files(hub, repo, revision)}
    wanted = [files[path] for path in choose(files)]
    folder = modelscope_folder(repo)
    lacking = [file for file in wanted if not _is_whole(folder / file.path, file.size)]
    if lacking:
        with ProgressStage(show, DOWNLOAD, repo, total=sum(file.size for file in lacking)) as stage:
            before, total = 0, sum(file.size for file in lacking)
            for file in lacking:
                _fetch(hub, repo, revision, file, folder, counter(stage, before, total))
                before += file.size
    sums = json.dumps({file.path: file.sha256 for file in wanted}, indent=1)
    (folder / CHECKSUMS).write_text(sums, encoding="utf-8")
    return folder


def counter(stage: ProgressStage, before: int, total: int) -> Callable[[int], None]:
    """Return a counter of one file's bytes for `stage`, after the `before` bytes of others."""
    return lambda count: stage.count(before + count, total)


def list_files(hub: str, repo: str, revision: str) -> list[RemoteFile]:
    """Ask the hub for the files of a repository. Raises StartupError naming MODEL."""
    query = urllib.parse.urlencode({"Revision": revision, "Recursive": "true"})
    address = f"{hub}/api/v1/models/{repo}/repo/files?{query}"
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:  # the operator's own hub
            entries = json.load(answer)["Data"]["Files"]
        return [_file(entry) for entry in entries if entry.get("Type") != "tree"]
    except urllib.error.HTTPError as error:
        why = f"ModelScope has no such model or revision {revision}" if error.code == 404 else f"HTTP {error.code}"
        raise StartupError(f"MODEL {repo}: {why}", flag="MODEL") from error
    except OSError as error:
        raise StartupError(f"MODEL {repo}: ModelScope cannot be reached at {hub}", flag="MODEL") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"MODEL {repo}: {hub} does not answer like ModelScope", flag="MODEL") from error


def _file(entry: dict[str, Any]) -> RemoteFile:
    path = str(entry["Path"])
    # A hub must not choose where files are written.
    if path.startswith("/") or ".." in path.split("/") or "\\" in path:
        raise ValueError("a path that leaves the folder")
    return RemoteFile(path, int(entry["Size"]), str(entry.get("Sha256") or "").lower())


def _default_url() -> str:
    domain = current_environment().get("MODELSCOPE_DOMAIN")
    return f"https://{domain}" if domain else DEFAULT_URL


def _is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _fetch(hub: str, repo: str, revision: str, file: RemoteFile, folder: Path, count: Callable[[int], None]) -> None:
    """Download one file, from where an earlier try ended. Raises StartupError naming MODEL."""
    path = folder / file.path
    part = path.with_name(f"{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    query = urllib.parse.urlencode({"Revision": revision, "FilePath": file.path})
    address = f"{hub}/api/v1/models/{repo}/repo?{query}"
    tries = 0
    while (have := part.stat().st_size if part.is_file() else 0) < file.size or not part.is_file():
        try:
            _append(address, part, have, file.size, count)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403, 404):
                raise StartupError(f"MODEL {repo}: {file.path}: HTTP {error.code}", flag="MODEL") from error
        now = part.stat().st_size if part.is_file() else 0
        tries = 0 if now > have else tries + 1
        if tries >= _MOST_TRIES:
            told = f"MODEL {repo}: the connection was lost repeatedly during {file.path}; the next try continues there"
            raise StartupError(told, flag="MODEL")
        if tries:
            time.sleep(_FIRST_WAIT_SECONDS * 2**tries)
    if part.stat().st_size > file.size:
        part.unlink()
        raise StartupError(f"MODEL {repo}: {file.path} is longer than the hub says: run again", flag="MODEL")
    part.replace(path)


def _append(address: str, part: Path, have: int, size: int, count: Callable[[int], None]) -> None:
    """Append a file's incoming bytes to the `have` bytes of `part`. Raises OSError and http.client's errors."""
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        # A server without support for ranges sends the whole file.
        goes_on = have > 0 and answer.status == http.client.PARTIAL_CONTENT
        have = have if goes_on else 0
        with part.open("ab" if goes_on else "wb") as target:
            while piece := answer.read(_PIECE):
                target.write(piece)
                have += len(piece)
                count(min(have, size))
