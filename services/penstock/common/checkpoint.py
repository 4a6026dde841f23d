"""Place of a model: the embedded one, a folder or a file, one with a short name, or a Hugging Face hub id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from penstock.common.environment import hub_cache_folder, is_hub_off
from penstock.common.errors import StartupError
from penstock.common.gguf_folder import gguf_folder, made_folder
from penstock.common.gguf_parts import SUFFIX, first_of, whole_name
from penstock.common.named_models import named_file
from penstock.common.progress import ShowProgress, show_nothing

DEMO_MODEL_NAME = "penstock-demo"
# Values of --draft-head beside folders and hub ids: the embedded model's, and the layers for drafts of MODEL itself.
DEMO_HEAD, OWN_HEAD = "demo", "checkpoint"
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt", "vocab.txt"]
# Time for the hub to list a model's files; after that only its cache is used.
HUB_SECONDS = 10.0
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
# Most characters of a MODEL in an error's one line.
_SHOWN_CHARS = 80
_PATH_PREFIXES = ("/", "./", "../", "~")


def demo_folder() -> Path:
    """Return the embedded model's folder."""
    return Path(str(resources.files("penstock") / "assets" / "demo"))


def demo_head_folder() -> Path:
    """Return the folder of the embedded model's draft head."""
    return demo_folder().with_name("demo_head")


def model_name(model: str | Path | None) -> str:
    """Return the name that clients use: `penstock-demo`, the hub id, or the folder's own name."""
    if model is None or Path(model) == demo_folder():
        return DEMO_MODEL_NAME
    path = _path(model)
    if path.is_file() and path.suffix == SUFFIX:
        return whole_name(path)
    if path.is_dir() or _looks_like_path(str(model)):
        return path.resolve().name
    return str(model).partition("@")[0]


def source_name(folder: Path) -> str:
    """Return the name of a checkpoint's folder: `owner/name@commit` in the hub's cache, else its own name."""
    folder = folder.resolve()
    kind, _, repo = folder.parent.parent.name.partition("--")
    if folder.parent.name == "snapshots" and kind == "models" and repo:
        return f"{repo.replace('--', '/')}@{folder.name}"
    return folder.name


def check_model(model: str | None) -> None:
    """Check quickly, without the hub, that `model` can exist. Raises StartupError as `resolve_model` does.

    For the start of a command, before imports that take seconds. Without the hub (HF_HUB_OFFLINE), a model that is not
    in the hub's cache is also an error.
    """
    found = _locate(model)
    if isinstance(found, Path):
        return
    folder = Path(hub_cache_folder()) / f"models--{found['id'].replace('/', '--')}"
    if is_hub_off() and not folder.is_dir():
        raise StartupError(_unreachable(str(model), "HF_HUB_OFFLINE forbids requests to the hub"), flag="MODEL")


def resolve_model(
    model: str | None,
    *,
    allow_hub: bool = True,
    show: ShowProgress = show_nothing,
    offline: bool = False,
    files: Sequence[str] = HUB_FILES,
) -> Path:
    """Find the folder of `model`: None is the embedded one; then an existing folder; then a short name; then a hub id.

    A GGUF file, or a folder with one and without config.json, is first made a folder in the cache (`gguf_folder`),
    which takes seconds; not if `allow_hub` is false. A hub id is `owner/name@revision`. Only safetensors, JSON, Jinja
    and vocabulary files are downloaded. `show` gets the progress; it may raise to give up. `offline`: use only the
    hub's cache. `files`: patterns of fewer files. Raises StartupError naming MODEL.
    """
    found = _locate(model)
    if isinstance(found, Path):
        if found.suffix != SUFFIX or found.is_dir():
            return found
        if not allow_hub and (made := made_folder(found)) is not None:
            return made
        if allow_hub:
            return gguf_folder(found)
        raise StartupError(f"MODEL {model}: its folder does not exist yet", flag="MODEL")
    if not allow_hub:
        raise StartupError(f"MODEL {model}: {_missing(Path(str(model)))}, and the hub is off", flag="MODEL")
    asks_cache_only = offline or is_hub_off()
    return _download(str(model), found["id"], found["revision"], list(files), show, is_hub_off=asks_cache_only)


def _locate(model: str | None) -> Path | re.Match[str]:
    """Return the folder, a GGUF file (also that of a short name), or the parts of a hub id.

    Raises StartupError naming MODEL.
    """
    if model is None:
        return _checked(demo_folder(), "the embedded model")
    path = _path(model)
    if path.is_dir():
        return _gguf_in(path) or _checked(path, f"the folder {path}")
    if path.is_file() and path.suffix == SUFFIX:
        return path
    if path.exists():
        raise StartupError(
            f"MODEL {model} is a file; expected a folder with config.json, or a file named *{SUFFIX}",
            flag="MODEL",
        )
    if (named := named_file(model)) is not None:
        return named
    match = _HUB_ID.fullmatch(model)
    if _looks_like_path(model) or match is None:
        raise StartupError(f"MODEL {model}: {_missing(path)}", flag="MODEL")
    return match


def _gguf_in(folder: Path) -> Path | None:
    """Return the only GGUF file of a folder without config.json, or the first of its parts; None: there is none.
    Raises StartupError."""
    found = [] if (folder / "config.json").exists() else sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) > 1 and (first := first_of(found)) is not None:
        return first
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3])
        raise StartupError(f"MODEL {folder} has several GGUF files ({names}): give one of them as MODEL", flag="MODEL")
    return found[0] if found else None


def _path(model: str | Path) -> Path:
    """Return MODEL as a path. Raises StartupError if it cannot be one."""
    try:
        path = Path(model).expanduser()
        # It raises for too long a name, or for a folder on the way that cannot be read.
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:
        # pathlib's own words: no home folder of this user.
        why = error.strerror if isinstance(error, OSError) else str(error)
        shown = str(model) if len(str(model)) <= _SHOWN_CHARS else f"{str(model)[:_SHOWN_CHARS]}…"
        raise StartupError(f"MODEL {shown}: {why}", flag="MODEL") from error
    return path


def _missing(path: Path) -> str:
    """Make the error text, with the absolute path of the missing folder when MODEL is not absolute itself."""
    where = path.resolve()
    return "no such folder" if where == path else f"no such folder ({where})"


def _looks_like_path(model: str) -> bool:
    return model.startswith(_PATH_PREFIXES) or model.endswith("/") or model.count("/") > 1


def _checked(folder: Path, what: str) -> Path:
    if not any((folder / name).is_file() for name in ("config.json", "tokenizer.json", "tokenizer_config.json")):
        raise StartupError(f"MODEL: {what} has no config.json and no tokenizer.json ({folder})", flag="MODEL")
    return folder


def _download(
    model: str, repo: str, revision: str | None, files: list[str], show: ShowProgress, *, is_hub_off: bool
) -> Path:
    try:
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        from penstock.common.hub_download import ConnectionLost, download
    except ImportError as error:
        raise StartupError(
            f"MODEL {model}: no such folder, and huggingface-hub, which asks the hub, is not installed: "
            "pip install 'penstock[generation]'",
            flag="MODEL",
        ) from error
    try:
        return download(repo, revision, files, show, ask_seconds=HUB_SECONDS, is_hub_off=is_hub_off)
    except RevisionNotFoundError as error:
        raise StartupError(
            f"MODEL {model}: the hub has {repo}, but not the revision {revision}", flag="MODEL"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"MODEL {model}: {_missing(Path(model))}, and the hub has no such model, or shows it only with an HF_TOKEN",
            flag="MODEL",
        ) from error
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE forbids requests to the hub" if is_hub_off else "the hub cannot be reached"
        raise StartupError(_unreachable(model, why), flag="MODEL") from error
    except ConnectionLost as error:
        told = f"MODEL {model}: the connection to the hub was lost repeatedly; the next try continues from there"
        raise StartupError(told, flag="MODEL") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        response = getattr(error, "response", None)
        what = f"HTTP status {response.status_code}" if response is not None else type(error).__name__
        raise StartupError(
            f"MODEL {model}: {_missing(Path(model))}, and the hub could not provide it ({what})", flag="MODEL"
        ) from error


def _unreachable(model: str, why: str) -> str:
    return (
        f"MODEL {model}: {_missing(Path(model))}, the hub's cache does not have it, and {why}. Give a folder as MODEL "
        "(--model), or fetch it where the hub can be reached and point HF_HOME at that cache; HF_HUB_OFFLINE=1 uses "
        "only the cache"
    )
