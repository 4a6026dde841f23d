"""Commands of `penstock`. The module imports only what --help needs; each command imports its own work."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from penstock import __version__
from penstock.cli.adapters import (
    AdaptersConfig,
    ListAdaptersConfig,
    LoadAdapterConfig,
    run_list,
    run_load,
    run_unload,
)
from penstock.cli.admin_commands import AdminConfig, DrainConfig, run_drain, run_reload, run_resume
from penstock.cli.bench.config import BenchConfig
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.client.watermark import WatermarkConfig, run_detect
from penstock.cli.console import say
from penstock.cli.debug import DebugConfig, run_state
from penstock.cli.flags import ENV_NOTE, Overrides, command
from penstock.cli.pack_config import PackConfig
from penstock.cli.trace import TraceConfig, run_trace
from penstock.common.options import options_of
from penstock.common.ports import ROUTER_PORT

EPILOG = """Examples:

  penstock serve                     the embedded model on 127.0.0.1:50050

  penstock chat                      talk to it

  penstock complete "1 + 1 ="        complete a text

  penstock infer --data-file FILE    answer a file of prompts, without a server

  penstock bench --concurrency 16    put load on it

  penstock health                    is it ready?"""
CHAT_EPILOG = f"""/reset forgets the conversation, /system TEXT gives instructions, /stats shows timings, /quit ends;
Ctrl-C stops an answer.

{ENV_NOTE}

Examples:

  penstock chat --stats

  penstock chat --do-sample --temperature 0.8 --min-p 0.05 --seed 1

  penstock chat --address gpu-box:50050 --tls-ca ca.pem --token-file token"""
COMPLETE_EPILOG = f"""{ENV_NOTE}

Examples:

  penstock complete "The capital of France is" --max-new-tokens 16

  git log -1 | penstock complete - --temperature 0 --stop '.'

  penstock complete "Dear" --num-beams 4 --length-penalty 0.8 --no-repeat-ngram-size 3

  penstock complete "The Eiffel Tower" --penalty-alpha 0.6 --top-k 4

  penstock complete "Repeat: one two three" --prompt-lookup-num-tokens 5 --stats

  penstock complete "A cheerful poem:" --guidance-scale 1.5 --negative-prompt "A sad poem:"

  penstock complete "A person as JSON:" --json-schema @person.json

  penstock complete "Is water wet?" --choice yes --choice no

  penstock complete "Once" --option 'bad_words_ids=[[5], [6, 7]]'"""

BENCH_EPILOG = f"""A closed loop keeps --concurrency requests open; an open loop sends --rate
a second, whether the server keeps up or not, and counts from when each was due.
Exit code 1: no request succeeded. docs/guide/benchmarks.md explains the figures.

{ENV_NOTE}

Examples:

  penstock bench --concurrency 16 --requests 200 --prompt-tokens 128 --output-tokens 64

  penstock bench --rate 4 --duration 60s --prompt-tokens 32-512 --output-tokens 16-128 --json load.json

  penstock bench --rate 8 --duration 30s --slo-ttft 500ms --slo-tpot 50ms

  penstock bench --rates 1,2,4,8 --duration 30s --slo-ttft 500ms --dataset prompts.jsonl --plot curves.svg

  penstock bench --direct --address 127.0.0.1:50052 --common-prefix-tokens 512 --prompt-tokens 544"""

DEBUG_EPILOG = """No token, text or request id is shown: a request is the first 12 digits of its id's
SHA-256 (printf %s ID | sha256sum | cut -c1-12).
docs/learn/engine.md explains the columns.

Examples:

  penstock debug state --address 127.0.0.1:50052

  penstock debug state --address 127.0.0.1:50050 --backend 127.0.0.1:50052   through a router

  penstock debug state --json"""

TRACE_EPILOG = """docs/guide/observability.md explains the spans.

Examples:

  penstock serve --tracing-endpoint file:/tmp/traces.jsonl

  penstock debug trace /tmp/traces.jsonl

  penstock debug trace /tmp/traces.jsonl --trace-id 4bf92f35 --svg trace.svg"""

ADAPTERS_EPILOG = f"""Only folders below the service's --adapter-root can be loaded. A router asks the backend that
--backend names, and takes the tokens of its --admin-token-file (--token-file here).
docs/guide/adapters.md explains it.

{ENV_NOTE}

Examples:

  penstock adapters list

  penstock adapters load support ./support-v2 --replace

  penstock adapters load support --backend 10.0.0.7:50052

  penstock adapters unload support"""

ADMIN_EPILOG = f"""A router sends requests elsewhere while a backend drains or reloads. It asks the backend that
--backend names, and takes the tokens of its --admin-token-file (--token-file here).
docs/guide/generation-service.md explains it.

{ENV_NOTE}

Examples:

  penstock admin drain --grace-seconds 30

  penstock admin resume

  penstock admin reload --backend 10.0.0.7:50052

  penstock admin drain --address 127.0.0.1:50052          past the router"""

PACK_EPILOG = f"""Everything that takes a MODEL takes the folder OUTPUT. Its weights are mapped as
they are: a start copies nothing, and the processes of a host share them.
docs/guide/packed-models.md says when it pays.

{ENV_NOTE}

Examples:

  penstock pack ./my-model ./my-model-int8 --dtype bfloat16 --quantization int8

  penstock serve ./my-model-int8

  penstock pack ./my-model-int8 --check"""

WATERMARK_EPILOG = f"""TEXT is output alone, without its prompt. Its ids are more exact: text may
become other tokens than those it was generated as. docs/guide/sampling.md explains it.

{ENV_NOTE}

Examples:

  penstock watermark detect "The capital of France is Paris, and ..."

  penstock watermark detect - --seeding-scheme selfhash --context-width 4

  penstock watermark detect --token-ids "9707 11 1879" --json"""

app = typer.Typer(
    name="penstock",
    help="Hugging Face's generate(), continuously batched, behind gRPC services.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ServeGroup(TyperGroup):
    """Group of serve: `serve [MODEL]` runs the tree, `serve tokenizer|generation|router` one service.

    The commands are made when one is called, since they need the configurations of all services. A first word that
    names no service is the MODEL of the tree.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from penstock.cli.serve.commands import commands
        from penstock.cli.serve.service_process import EVERYTHING

        self.commands.update(typer.main.get_group(commands).commands)
        if not args or args[0] not in self.commands:
            args = [EVERYTHING, *args]
        return super().parse_args(ctx, args)


app.add_typer(
    typer.Typer(cls=ServeGroup), name="serve", help="Serve a model: everything ([MODEL]), or one service of it."
)


class ModelsGroup(TyperGroup):
    """Group of models. Its commands are made when one is called: they need the generation service's configuration."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from penstock.cli.client.models import commands

        self.commands.update(typer.main.get_group(commands).commands)
        return super().parse_args(ctx, args)


app.add_typer(typer.Typer(cls=ModelsGroup), name="models", help="Load, unload and show a generation service's model.")


def _lazy(module: str) -> type[TyperCommand]:
    """Make the class of a command that `module` has in its `commands`: imported when it is called, for its flags."""

    class Lazy(TyperCommand):
        def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
            return typer.main.get_command(import_module(module).commands).make_context(info_name, args, parent, **extra)

    return Lazy


@app.command("infer", cls=_lazy("penstock.cli.infer.command"))
def infer() -> None:
    """Answer a file of prompts, or converse: the flags of inference_hf.py, and ours."""


@app.command("download", cls=_lazy("penstock.cli.download"))
def download() -> None:
    """Download what serving a model needs from a hub, and verify it."""


@app.command("inspect", cls=_lazy("penstock.cli.inspect_model"))
def inspect_model() -> None:
    """Show what a model is, what it takes, and whether it starts here."""


def _version(wanted: bool) -> None:
    if wanted:
        say(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks on errors.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself."""


def _chat(given: Overrides) -> None:
    from penstock.cli.client.chat import run_chat

    run_chat(given)


def _complete(given: Overrides) -> None:
    from penstock.cli.client.chat import run_complete

    run_complete(str(given.pop("prompt")), given)


_PROMPT = inspect.Parameter(
    "prompt",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Argument(..., help="Text to continue; - reads it from standard input."),
    annotation=str,
)
_CLIENT_OPTIONS = [*options_of(SamplingConfig), *options_of(ConnectionConfig)]
app.command("chat", epilog=CHAT_EPILOG)(command(_CLIENT_OPTIONS, _chat, "Talk to a model."))
app.command("complete", epilog=COMPLETE_EPILOG)(
    command(_CLIENT_OPTIONS, _complete, "Continue a text, and write it to standard output.", first=[_PROMPT])
)


def _detect(given: Overrides) -> None:
    run_detect(str(given.pop("text")), given)


_TEXT = inspect.Parameter(
    "text",
    inspect.Parameter.KEYWORD_ONLY,
    default=typer.Argument(..., help="Text to judge; - reads it from standard input."),
    annotation=str,
)
_watermark = typer.Typer(no_args_is_help=True)
_watermark.command("detect", epilog=WATERMARK_EPILOG)(
    command(
        [*options_of(WatermarkConfig), *options_of(ConnectionConfig)],
        _detect,
        "Tell whether a text was generated under a watermark.",
        first=[_TEXT],
    )
)


@_watermark.callback()
def _watermark_root() -> None:
    """Keep `detect` a command of its own."""


app.add_typer(_watermark, name="watermark", help="Watermarks of generated text.")


_adapters = typer.Typer(
    no_args_is_help=True, help="LoRA adapters of a running generation service.", epilog=ADAPTERS_EPILOG
)


def _adapters_load(given: Overrides) -> None:
    run_load(str(given.pop("name")), str(given.pop("path", "")), given)


def _adapters_unload(given: Overrides) -> None:
    run_unload(str(given.pop("name")), given)


def _bench(given: Overrides) -> None:
    from penstock.cli.bench.command import run_bench

    raise typer.Exit(run_bench(given))


app.command("bench", epilog=BENCH_EPILOG)(
    command(options_of(BenchConfig), _bench, "Put load on a server, and tell times, throughput and failures.")
)


@app.command()
def health(
    addresses: Annotated[
        list[str] | None, typer.Argument(metavar="[ADDRESS]...", help="host:port of each server; the router's default.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 3.0,
    tls: Annotated[bool, typer.Option("--tls", help="Use TLS; trust the system's CAs.")] = False,
    tls_ca: Annotated[str | None, typer.Option(metavar="FILE", help="Use TLS; trust this CA (PEM).")] = None,
    client_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate for mutual TLS (PEM).")] = None,
    client_key: Annotated[str | None, typer.Option(metavar="FILE", help="Key of --client-cert (PEM).")] = None,
) -> None:
    """Ask servers whether they are ready; exit code 0 when all are SERVING. Needs no bearer token.

    Inside a service's container no address is needed: it asks by PENSTOCK_HEALTH_SOCKET, whatever the TLS settings.
    """
    from penstock.cli.health import run_health

    raise typer.Exit(
        run_health(addresses or [f"127.0.0.1:{ROUTER_PORT}"], timeout, tls, tls_ca, client_cert, client_key)
    )


@app.command()
def env() -> None:
    """Versions, CPU, memory and devices: what a bug report needs."""
    from penstock.cli.env import run_env

    run_env()


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help="Device to examine, as the generation service's --device.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Number format: bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Run a device's operators beside the CPU's in float32; exit code 1 where one fails or gives other numbers."""
    from penstock.cli.kernels import run_doctor

    raise typer.Exit(run_doctor(device, dtype))


@app.command("build-kernels")
def build_kernels(
    system: Annotated[
        bool, typer.Option("--system", help="For all users of this Python environment, as in an image.")
    ] = False,
) -> None:
    """Compile the C++ kernels, once for each version of them and of the compiler. Needs g++."""
    from penstock.cli.kernels import run_build_kernels

    run_build_kernels(system=system)


def _pack(given: Overrides) -> None:
    from penstock.cli.pack import run_pack
    from penstock.common.logging import configure_logging

    # Standard output is for the result; before this call warnings go there, too.
    configure_logging("pack", level="warning")
    output = given.pop("output", None)
    run_pack(str(given.pop("folder")), None if output is None else str(output), given)


debug_app = typer.Typer(help="Look inside a running service, and at traces of requests.", no_args_is_help=True)
app.add_typer(debug_app, name="debug")
debug_app.command("state", epilog=DEBUG_EPILOG)(
    command(
        options_of(DebugConfig),
        run_state,
        "Show what a generation service's engine holds and does: requests, blocks, the last step. Changes nothing.",
    )
)


def _argument(name: str, metavar: str, default: Any, help: str, annotation: Any) -> inspect.Parameter:
    argument = typer.Argument(default, metavar=metavar, help=help, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=argument, annotation=annotation)


debug_app.command("trace", epilog=TRACE_EPILOG)(
    command(
        options_of(TraceConfig),
        run_trace,
        "Show a request's way through the services, as spans that --tracing-endpoint file:FILE kept.",
        first=[_argument("path", "FILE", ..., "File of traces.", str)],
    )
)
_ADAPTER_NAME = _argument("name", "NAME", ..., "Name by which requests ask for it.", str)
_ADAPTER_PATH = _argument(
    "path",
    "FOLDER",
    None,
    "PEFT folder below the service's --adapter-root; by default the one of that name.",
    str | None,
)
_adapters.command("list")(
    command(options_of(ListAdaptersConfig), run_list, "Show the adapters that requests may name.")
)
_adapters.command("load")(
    command(
        options_of(LoadAdapterConfig),
        _adapters_load,
        "Load an adapter, beside the requests that run.",
        first=[_ADAPTER_NAME, _ADAPTER_PATH],
    )
)
_adapters.command("unload")(
    command(
        options_of(AdaptersConfig),
        _adapters_unload,
        "Forget an adapter: requests that have it go on to their end.",
        first=[_ADAPTER_NAME],
    )
)
app.add_typer(_adapters, name="adapters")

_admin = typer.Typer(no_args_is_help=True, help="Drain, resume and reload a generation service.", epilog=ADMIN_EPILOG)
_admin.command("drain")(
    command(options_of(DrainConfig), run_drain, "Refuse new requests, and wait until the live ones are over.")
)
_admin.command("resume")(command(options_of(AdminConfig), run_resume, "Take requests again, after a drain."))
_admin.command("reload")(
    command(
        options_of(DrainConfig),
        run_reload,
        "Read the model's weights again from the same folder, between a drain and a resume.",
    )
)
app.add_typer(_admin, name="admin")

_PACK_ARGUMENTS = [
    _argument("folder", "MODEL", ..., "Folder or hub id of the checkpoint.", str),
    _argument("output", "OUTPUT", None, "Folder to write.", str | None),
]
app.command("pack", epilog=PACK_EPILOG)(
    command(
        options_of(PackConfig),
        _pack,
        "Write a model's weights as the C++ kernels read them: starts take less time and memory.",
        first=_PACK_ARGUMENTS,
    )
)


@app.command()
def demo() -> None:
    """Start everything on the embedded model, show one answer and its timings, and stop."""
    from penstock.cli.demo import run_demo

    raise typer.Exit(run_demo())
