"""Place of a model: the embedded one, a folder, or a Hugging Face hub id."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from penstock.common.errors import StartupError

DEMO_MODEL_NAME = "penstock-demo"
HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_ID = re.compile(r"(?P<id>[\w-][\w.-]*(/[\w-][\w.-]*)?)(@(?P<revision>[\w./-]+))?")
_PATH_PREFIXES = ("/", "./", "../", "~")


def demo_folder() -> Path:
    """Return the embedded model's folder."""
    return Path(str(resources.files("penstock") / "assets" / "demo"))


def model_name(model: str | Path | None) -> str:
    """Return the name that clients use: `penstock-demo`, the hub id, or the folder's own name."""
    if model is None or Path(model) == demo_folder():
        return DEMO_MODEL_NAME
    path = Path(model).expanduser()
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


def resolve_model(model: str | None, *, allow_hub: bool = True, progress: Callable[[str], None] | None = None) -> Path:
    """Find the folder of `model`: None is the embedded one; then an existing folder; then a hub id.

    A hub id is `owner/name@revision`. Only safetensors, JSON, Jinja and vocabulary files are downloaded. Raises
    StartupError naming MODEL.
    """
    if model is None:
        return _checked(demo_folder(), "the embedded model")
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path, f"the folder {path}")
    if path.exists():
        raise StartupError(f"MODEL {model} is a file; expected a folder with config.json", flag="MODEL")
    match = _HUB_ID.fullmatch(model)
    if _looks_like_path(model) or match is None:
        raise StartupError(f"MODEL {model}: {_missing(path)}", flag="MODEL")
    if not allow_hub:
        raise StartupError(f"MODEL {model}: {_missing(path)}, and the hub is off", flag="MODEL")
    return _download(model, match["id"], match["revision"], progress)


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


def _download(model: str, repo: str, revision: str | None, progress: Callable[[str], None] | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise StartupError(
            f"MODEL {model}: no such folder, and huggingface-hub is not installed", flag="MODEL"
        ) from error
    if progress is not None:
        progress(f"fetching {repo} from the hub")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(
            f"MODEL {model}: {_missing(Path(model))}, and the hub could not give it ({type(error).__name__})",
            flag="MODEL",
        ) from error
