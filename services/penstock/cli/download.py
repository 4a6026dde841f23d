"""Command `penstock download`: fetch the files that serving needs from a hub into its cache, and verify them."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import typer

from penstock.cli.console import complain, say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.cli.progress_display import LiveLine, PlainLines, ProgressDisplay, is_live
from penstock.common import modelscope
from penstock.common.checkpoint import HUB_FILES, resolve_model
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.named_models import named_file
from penstock.common.options import option, options_of
from penstock.common.progress import CHECK, ProgressStage, ShowProgress
from penstock.common.units import format_size

EPILOG = f"""Only files that serving reads are fetched: safetensors, configuration, tokenizer and templates.
Every file is compared with the checksum from its hub. An interrupted download continues where
it stopped. HF_TOKEN, HF_ENDPOINT, HF_HOME and MODELSCOPE_CACHE are honoured.

{ENV_NOTE}

Examples:

  penstock download Qwen/Qwen2.5-0.5B-Instruct

  penstock download Qwen/Qwen2.5-0.5B-Instruct --revision main --output ./qwen

  penstock download Qwen/Qwen2.5-0.5B-Instruct --source modelscope

  penstock download Qwen/Qwen2.5-0.5B-Instruct --offline"""
GROUP = "Download"
_PIECE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class DownloadConfig:
    """Configuration of `penstock download`."""

    revision: str | None = option(
        None, "Branch, tag or commit; MODEL@REVISION does the same. By default the hub's main branch.", group=GROUP
    )
    source: Literal["huggingface", "modelscope"] = option(
        "huggingface",
        "Hub that has the model; it also decides the layout of the cache.",
        group=GROUP,
        env="PENSTOCK_DOWNLOAD_SOURCE",
    )
    offline: bool = option(False, "Ask no hub: verify what the cache has.", group=GROUP)
    output: str | None = option(
        None,
        "Also copy the files into this folder, for machines without the cache.",
        group=GROUP,
        env="PENSTOCK_DOWNLOAD_OUTPUT",
        metavar="FOLDER",
    )
    hub_url: str | None = option(
        None, "Address of a ModelScope hub; for a Hugging Face hub set HF_ENDPOINT.", group=GROUP, metavar="URL"
    )


def run_download(model: str, given: Overrides) -> None:
    """Download, verify, and print the place. Raises StartupError naming MODEL or a flag."""
    config = from_env_and_flags(DownloadConfig, given)
    if Path(model).expanduser().is_dir():
        raise StartupError(f"MODEL {model} is a local folder: give a hub's id, owner/name", flag="MODEL")
    if (file := named_file(model)) is not None:
        say(f"{file}: of an installed package")
        say(f"serve it with: penstock serve {model}")
        return
    repo, _, revision = model.partition("@")
    if revision and config.revision and revision != config.revision:
        raise StartupError("--revision and MODEL@REVISION differ: give one of them", flag="--revision")
    if config.hub_url and config.source != "modelscope":
        raise StartupError("--hub-url is for --source modelscope; set HF_ENDPOINT", flag="--hub-url")
    revision = revision or config.revision or ""
    fetch = partial(_from_modelscope if config.source == "modelscope" else _from_hugging_face, repo, revision, config)
    display = ProgressDisplay(LiveLine(sys.stderr) if is_live(sys.stderr) else PlainLines(complain))
    try:
        folder = _verified(fetch, repo, display.show, offline=config.offline)
        shown = folder if config.output is None else _copied(folder, Path(config.output).expanduser())
    finally:
        display.close()
    files = _files(folder)
    say(f"{shown}: {len(files)} files, {format_size(sum(path.stat().st_size for path in files))}, verified")
    say(f"serve it with: penstock serve {shown if config.output or config.source == 'modelscope' else model}")


def _from_hugging_face(repo: str, revision: str, config: DownloadConfig, show: ShowProgress) -> Path:
    return resolve_model(f"{repo}@{revision}" if revision else repo, show=show, offline=config.offline)


def _from_modelscope(repo: str, revision: str, config: DownloadConfig, show: ShowProgress) -> Path:
    if not all(part and not part.startswith(".") for part in repo.split("/")) or repo.count("/") != 1:
        raise StartupError(f"MODEL {repo}: expected owner/name", flag="MODEL")
    folder = modelscope.modelscope_folder(repo)
    if config.offline:
        if not (folder / modelscope.CHECKSUMS).is_file():
            raise StartupError(f"MODEL {repo}: not in ModelScope's cache ({folder}), and --offline", flag="MODEL")
        return folder
    # Imports huggingface_hub. Its rule for choosing files holds for either hub.
    from penstock.common.hub_download import serving_files

    wanted = revision or modelscope.DEFAULT_REVISION
    return modelscope.download(
        repo,
        wanted,
        lambda names: serving_files(names, HUB_FILES),
        show,
        url=config.hub_url and config.hub_url.rstrip("/"),
    )


def _verified(fetch: Callable[[ShowProgress], Path], repo: str, show: ShowProgress, *, offline: bool) -> Path:
    """Return the folder once each file has its checksum; a file with another checksum is fetched once more.

    Raises StartupError naming MODEL.
    """
    folder = fetch(show)
    _check_whole(folder, repo)
    wrong = _wrong_files(folder, repo, show)
    if wrong and not offline:
        for path in wrong:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        complain(f"{', '.join(path.name for path in wrong)}: the checksum is not the hub's; downloading again")
        folder = fetch(show)
        wrong = _wrong_files(folder, repo, show)
    if wrong:
        # Nobody must serve them.
        for path in () if offline else wrong:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
        names = ", ".join(path.name for path in wrong)
        advice = (
            "run without --offline"
            if offline
            else "the hub, or a proxy before it, sends bytes that do not match its checksum"
        )
        raise StartupError(f"MODEL {repo}: the checksum of {names} is wrong: {advice}", flag="MODEL")
    return folder


def _check_whole(folder: Path, repo: str) -> None:
    """Check that all weights are there. Raises StartupError naming MODEL."""
    index = folder / "model.safetensors.index.json"
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else set()
        # It raises OSError for a name that a file cannot have.
        lacking = sorted(name for name in named if not (folder / name).is_file())
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise StartupError(f"MODEL {repo}: {index} cannot be read: remove it and run again", flag="MODEL") from error
    if lacking:
        some = f"{lacking[0]} and {len(lacking) - 1} more" if len(lacking) > 1 else lacking[0]
        raise StartupError(f"MODEL {repo}: {folder} has no {some}: run without --offline", flag="MODEL")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".penstock"))


def _wrong_files(folder: Path, repo: str, show: ShowProgress) -> list[Path]:
    """Return the files with another checksum than the hub's."""
    sums = _checksums(folder)
    files = [path for path in _files(folder) if path in sums]
    total = sum(path.stat().st_size for path in files)
    wrong, before = [], 0
    with ProgressStage(show, CHECK, repo, total=total) as stage:
        for path in files:
            if _digest(path, sums[path], modelscope.counter(stage, before, total)) != sums[path]:
                wrong.append(path)
            before += path.stat().st_size
    return wrong


def _checksums(folder: Path) -> dict[Path, str]:
    """Return the hub's checksums that the cache knows: 40 hex digits are git's, 64 SHA-256.

    Hugging Face's cache names each blob by its checksum, and a snapshot links to the blob.
    """
    told = folder / modelscope.CHECKSUMS
    if told.is_file():
        try:
            sums = json.loads(told.read_text(encoding="utf-8"))
            return {folder / name: str(value) for name, value in sums.items() if value}
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise StartupError(f"MODEL: {told} cannot be read: remove it and run again", flag="MODEL") from error
    named = {path: path.resolve().name for path in _files(folder)}
    return {path: name for path, name in named.items() if len(name) in (40, 64) and not name.strip("0123456789abcdef")}


def _digest(path: Path, like: str, count: Callable[[int], None]) -> str:
    """Compute the checksum of a file in the form of `like`."""
    size = path.stat().st_size
    found = hashlib.sha256() if len(like) == 64 else hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    done = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
            done += len(piece)
            count(done)
    return found.hexdigest()


def _copied(folder: Path, output: Path) -> Path:
    """Copy the files of `folder` to `output`, each whole under its name. Raises StartupError naming --output."""
    try:
        for path in _files(folder):
            target = output / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = target.with_name(f".{target.name}.part")
            shutil.copyfile(path, scratch)
            scratch.replace(target)
    except OSError as error:
        raise StartupError(f"--output {output}: {error.strerror}", flag="--output") from error
    return output


def _run(given: Overrides) -> None:
    run_download(str(given.pop("name")), given)


_MODEL = argument("name", "MODEL", "Id at the hub: owner/name, or owner/name@revision.", default=...)
commands = typer.Typer(add_completion=False)
commands.command("download", epilog=EPILOG)(command(options_of(DownloadConfig), _run, first=[_MODEL]))
