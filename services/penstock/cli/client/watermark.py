"""Command `penstock watermark detect`: evidence that a text was generated under a watermark."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import typer

from penstock.cli.client.connection import ConnectionConfig, open_client
from penstock.cli.console import say
from penstock.cli.flags import ENV_NOTE, Overrides, argument, command
from penstock.common.options import option, options_of

if TYPE_CHECKING:
    from penstock_client import WatermarkEvidence

EPILOG = f"""TEXT is output alone, without its prompt. Its ids are more exact: text may
become other tokens than those it was generated as. docs/guide/sampling.md explains it.

{ENV_NOTE}

Examples:

  penstock watermark detect "The capital of France is Paris, and ..."

  penstock watermark detect - --seeding-scheme selfhash --context-width 4

  penstock watermark detect --token-ids "9707 11 1879" --json"""

GROUP = "Watermark"
# Fields of WatermarkingConfig that decide which tokens are green.
_SCHEME = ("greenlist_ratio", "hashing_key", "seeding_scheme", "context_width")


@dataclass(frozen=True, kw_only=True)
class WatermarkConfig:
    """Configuration of the watermark; options left out are the model's own, or transformers' defaults."""

    model: str | None = option(
        None,
        "Model of the text; when left out, the only one served.",
        group=GROUP,
        flag="--model",
        env="PENSTOCK_CHAT_MODEL",
    )
    greenlist_ratio: float | None = option(None, "Share of the vocabulary that is green.", group=GROUP)
    hashing_key: int | None = option(None, "Key of the green lists.", group=GROUP, minimum=0)
    seeding_scheme: str | None = option(
        None, "Tokens that choose a green list.", group=GROUP, metavar="lefthash|selfhash"
    )
    context_width: int | None = option(None, "Number of those tokens.", group=GROUP, minimum=1)
    z_threshold: float = option(3.0, "Standard deviations above which a text counts as watermarked.", group=GROUP)
    ignore_repeated_ngrams: bool = option(False, "Count every n-gram once.", group=GROUP)
    token_ids: bool = option(False, "TEXT is token ids separated by spaces or commas.", group=GROUP)
    # The plain name is the variable of `penstock bench`'s file.
    json: bool = option(False, "Write the evidence as JSON.", group=GROUP, env="PENSTOCK_WATERMARK_JSON")

    def scheme(self) -> dict[str, object] | None:
        """Fields of WatermarkingConfig that are set; None, for the model's own, when none are."""
        given = {name: getattr(self, name) for name in _SCHEME if getattr(self, name) is not None}
        return given or None


def run_detect(text: str, given: Overrides) -> None:
    """Write the evidence to standard output. Raises PenstockError, StartupError."""
    from penstock.common.config import from_env_and_flags  # brings grpc, which --help must not wait for

    names = {bound.name for bound in options_of(ConnectionConfig)}
    connection = from_env_and_flags(ConnectionConfig, {n: v for n, v in given.items() if n in names})
    config = from_env_and_flags(WatermarkConfig, {n: v for n, v in given.items() if n not in names})
    written = sys.stdin.read() if text == "-" else text
    output = _ids(written) if config.token_ids else written
    with open_client(connection) as client:
        evidence = client.detect_watermark(
            output,
            watermarking_config=config.scheme(),
            z_threshold=config.z_threshold,
            ignore_repeated_ngrams=config.ignore_repeated_ngrams,
            model=config.model or "",
        )
    if config.json:
        say(json.dumps(asdict(evidence)))
        return
    for line in _lines(evidence, config.z_threshold):
        say(line)


def _ids(text: str) -> list[int]:
    from penstock.common.errors import StartupError  # brings grpc, which --help must not wait for

    words = text.replace(",", " ").split()
    # Check the length first: Python refuses to parse thousands of digits.
    if not all(len(word) <= 10 and word.isascii() and word.isdigit() and int(word) < 2**32 for word in words):
        raise StartupError("--token-ids: TEXT must be token ids separated by spaces or commas", flag="--token-ids")
    return [int(word) for word in words]


def _lines(evidence: WatermarkEvidence, threshold: float) -> tuple[str, str]:
    found = "watermark" if evidence.prediction else "no watermark"
    return (
        f"{found}: z {evidence.z_score:.2f}, threshold {threshold:g}, p {evidence.p_value:.2g}",
        f"{evidence.num_green_tokens} of {evidence.num_tokens_scored} scored tokens are green "
        f"({evidence.green_fraction:.1%})",
    )


def _detect(given: Overrides) -> None:
    run_detect(str(given.pop("text")), given)


commands = typer.Typer(no_args_is_help=True, add_completion=False)
commands.command("detect", epilog=EPILOG)(
    command(
        [*options_of(WatermarkConfig), *options_of(ConnectionConfig)],
        _detect,
        "Tell whether a text was generated under a watermark.",
        first=[argument("text", "TEXT", "Text to judge; - reads it from standard input.", default=...)],
    )
)


@commands.callback()
def _root() -> None:
    """Watermarks of generated text."""
    # With one command alone typer would leave its name out.
