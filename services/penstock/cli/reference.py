"""Text of docs/reference/configuration.md, made from the configurations by `make docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from penstock.cli.adapters import ListAdaptersConfig, LoadAdapterConfig
from penstock.cli.admin_commands import DrainConfig, PauseConfig
from penstock.cli.bench.config import BenchConfig
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.models import LoadConfig, UnloadConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.client.watermark import WatermarkConfig
from penstock.cli.command_table import COMMANDS
from penstock.cli.debug import DebugConfig
from penstock.cli.demo import DemoConfig
from penstock.cli.download import DownloadConfig
from penstock.cli.flags import shown_default
from penstock.cli.infer.config import InferConfig
from penstock.cli.inspect_model import InspectConfig
from penstock.cli.pack import PackConfig
from penstock.cli.quantize import QuantizeConfig
from penstock.cli.serve.service_process import ROLES
from penstock.cli.serve.tree import FRONT, TreeConfig
from penstock.cli.trace import TraceConfig
from penstock.common.config import ChannelConfig, ProcessConfig, ServerConfig
from penstock.common.options import BoundOption, options_of

HEAD = """# Configuration

Every option is a flag and an environment variable; a flag wins over its variable, a variable over the default. Sizes
are written `512MiB` or `2GiB` (powers of 1024) or `2GB` (of 1000), durations `250ms`, `30s` or `5m`. On a wrong value
the process ends with exit code 2 and one line that names the value. This file is made from the code:
`python -m penstock.cli.reference > docs/reference/configuration.md`.
"""
_NO_DEFAULT = object()
TREE = """`penstock serve [MODEL]` starts tokenizer, generation, router and [gateway](../guide/gateway.md) as one tree.
It takes its own options below, all of [every service](#every-service), and the options of the four services. It does
not take options that two services have under one name (other than MODEL and `--served-model-name`), nor those that
connect the services: it sets these itself. The other processes listen on free loopback ports, so these options concern
the router alone, and `--host` and `--insecure-bind` also the gateway: {front}. Variables reach every process of the
tree.
"""
GATEWAY = """`penstock serve gateway`, [OpenAI's HTTP](../guide/gateway.md), and these options of every service:
{shared}.
"""
INFER = """`penstock infer`; [the page](../guide/infer.md) explains them. It also takes the options of
`penstock complete` and of the connection above, and flags of the [generation service](#generation) for its own model.
An option of `complete` that is listed here has another default in this command.
"""


def configuration_markdown() -> str:
    """Make the whole page."""
    return "\n".join([HEAD, *_sections()])


def _sections() -> Iterator[str]:
    common = {bound.name for bound in options_of(ServerConfig)}
    process = {bound.name for bound in options_of(ProcessConfig)}
    channel = {bound.name for bound in options_of(ChannelConfig)} - common
    yield "## Commands\n"
    yield "\n".join(
        ["| command | |", "|---|---|", *(f"| `penstock {row.name}` | {row.help} |" for row in COMMANDS), ""]
    )
    yield "## The process tree\n"
    front = ", ".join(f"`--{name.replace('_', '-')}`" for name in sorted(FRONT))
    yield TREE.format(front=front)
    yield _table(options_of(TreeConfig))
    yield "## Every service\n"
    yield _table(bound for bound in options_of(ServerConfig) if bound.name not in ("port", "metrics_port"))
    for role in ROLES.values():
        yield f"## {role.name.capitalize()}\n"
        is_grpc = issubclass(role.config_class(), ServerConfig)
        if is_grpc:
            yield f"`penstock serve {role.name}`, and those of [every service](#every-service).\n"
        else:
            yield GATEWAY.format(shared=_flags(options_of(ProcessConfig)))
        own = ((common if is_grpc else process) - {"port", "metrics_port"}) | channel
        yield _table(bound for bound in options_of(role.config_class()) if bound.name not in own)
        if issubclass(role.config_class(), ChannelConfig):
            yield "Towards the other services:\n"
            # Options of the service itself: the gateway has its own text for one of them.
            yield _table(bound for bound in options_of(role.config_class()) if bound.name in channel)
    yield "## Clients\n"
    yield "`penstock chat` and `penstock complete`.\n"
    yield _table([*options_of(SamplingConfig), *options_of(ConnectionConfig)])
    connection = {bound.name for bound in options_of(ConnectionConfig)}
    yield "`penstock demo`.\n"
    yield _table(options_of(DemoConfig))
    yield "`penstock watermark detect TEXT`, and the options of the connection above.\n"
    yield _table(options_of(WatermarkConfig))
    yield "`penstock bench`, and the options of the connection above.\n"
    yield _table(bound for bound in options_of(BenchConfig) if bound.name not in connection)
    yield "`penstock debug state`, and the other options of the connection above.\n"
    own = {"address", "wait_seconds", "json"}
    yield _table(bound for bound in options_of(DebugConfig) if bound.name in own)
    yield "`penstock debug trace FILE`.\n"
    yield _table(options_of(TraceConfig))
    yield "`penstock adapters list`, `load` and `unload`, and the options of the connection above.\n"
    adapters = {bound.name: bound for kind in (ListAdaptersConfig, LoadAdapterConfig) for bound in options_of(kind)}
    yield _table(bound for name, bound in adapters.items() if name not in connection)
    yield "`penstock admin drain`, `pause`, `resume` and `reload`, and the options of the connection above.\n"
    bounds = {bound.name: bound for kind in (DrainConfig, PauseConfig) for bound in options_of(kind)}
    yield _table(bound for name, bound in bounds.items() if name not in connection)
    yield "`penstock models load FOLDER`, `unload` and `info`, and the other options of the connection above."
    yield "`load` also takes the model's flags of the [generation service](#generation) that LoadModelOptions has.\n"
    yield _table(_models_options(connection))
    yield "## A file of prompts, and models\n"
    yield INFER
    theirs = {bound.name: bound.default for bound in options_of(SamplingConfig)}
    yield _table(bound for bound in options_of(InferConfig) if theirs.get(bound.name, _NO_DEFAULT) != bound.default)
    yield "`penstock download MODEL`:\n"
    yield _table(options_of(DownloadConfig))
    yield "`penstock inspect MODEL`:\n"
    yield _table(options_of(InspectConfig))
    yield "## Quantising\n"
    yield "`penstock quantize MODEL OUTPUT`; [the page](../guide/quantised-checkpoints.md#make-one) says how.\n"
    yield _table(options_of(QuantizeConfig))
    yield "## Packing\n"
    yield "`penstock pack MODEL OUTPUT`; [the page](../guide/packed-models.md) says when it pays.\n"
    yield _table(options_of(PackConfig))


def _flags(options: Iterable[BoundOption]) -> str:
    return ", ".join(f"`{bound.flag}`" for bound in options)


def _models_options(connection: set[str]) -> Iterator[BoundOption]:
    """Options of `penstock models`, each once."""
    found = {bound.name: bound for kind in (LoadConfig, UnloadConfig) for bound in options_of(kind)}
    yield from (bound for name, bound in found.items() if name not in connection or name in ("address", "backend"))


def _table(options: Iterable[BoundOption]) -> str:
    """Make a row of each, those of a group together, as in the help."""
    options = list(options)
    groups = list(dict.fromkeys(bound.settings.group for bound in options))
    rows = ["| flag | variable | default | |", "|---|---|---|---|"]
    rows += [
        f"| {_flag(bound)} | `{bound.env}` | {_default(bound)} | {_text(bound)} |"
        for bound in sorted(options, key=lambda bound: groups.index(bound.settings.group))
        if not bound.settings.hidden
    ]
    return "\n".join(rows) + "\n"


def _flag(bound: BoundOption) -> str:
    if bound.is_bool:
        return f"`{bound.flag}`" if not bound.default else f"`{bound.flag}` / `--no-{bound.flag[2:]}`"
    value = bound.metavar.replace("|", "\\|")
    return "`MODEL`" if bound.flag == "MODEL" else f"`{bound.flag} {value}`"


def _default(bound: BoundOption) -> str:
    shown = shown_default(bound)
    return f"`{shown}`" if shown else ""


def _text(bound: BoundOption) -> str:
    return bound.settings.help.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
