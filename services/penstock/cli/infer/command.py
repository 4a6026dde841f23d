"""Command `penstock infer`. Imported when it is called, since it also has the engine's flags."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from penstock.cli.client.connection import ConnectionConfig
from penstock.cli.console import complain
from penstock.cli.flags import ENV_NOTE, Overrides, command
from penstock.cli.infer.batch_target import BatchTarget
from penstock.cli.infer.config import (
    ENDPOINT,
    MODEL,
    OUTPUT,
    PROMPTS,
    InferConfig,
    check_asked,
    connection_options,
    engine_options,
)
from penstock.cli.infer.conversation import converse
from penstock.cli.infer.line_batch import BatchFiles, LineBatch
from penstock.cli.infer.targets import LocalTarget, RemoteTarget, VllmTarget, check_vllm
from penstock.common.config import from_env_and_flags
from penstock.common.errors import StartupError
from penstock.common.options import options_of
from penstock.compat.inference_hf import flag_of

EPILOG = f"""Flags are written with - or _: --base-model, --base_model. The same command continues a run
that was killed. Exit code 3: every line is in the file, some with an Error.
docs/guide/infer.md explains it.

{ENV_NOTE}

Examples:

  penstock infer --base-model ./my-model --data-file prompts.txt --with-prompt

  penstock infer --base_model ./my-model --data_file prompts.txt --load_in_8bit --only_cpu

  penstock infer --data-file prompts.txt --no-do-sample --predictions-file out/answers.json

  penstock infer --endpoint 127.0.0.1:50050 --data-file prompts.txt --concurrency 32

  penstock infer --endpoint http://127.0.0.1:8000 --data-file prompts.txt --completion-window 12h

  penstock infer --endpoint vllm://gpu-node:8000 --base-model ./my-model --data-file prompts.txt

  penstock infer --base-model ./my-model --interactive --history-tokens 2048

  penstock infer --base-model ./my-model --lora support=./support --data-file prompts.txt

  penstock infer --guidance-scale 1.5 --negative-prompt "A sad poem:" --data-file prompts.txt"""


def run_infer(given: Overrides) -> int:
    """Answer a file or converse, and return the exit code. Raises StartupError for a wrong flag, PenstockError."""
    engine = {bound.name: given.pop(bound.name) for bound in engine_options() if bound.name in given}
    dialled = {bound.name: given.pop(bound.name) for bound in connection_options() if bound.name in given}
    config = from_env_and_flags(InferConfig, given)
    config.check(engine)
    config = _with_one_adapter(config, engine)
    if config.use_flash_attention_2:
        complain("--use-flash-attention-2 has no effect: the engine has its own attention over the paged pool")
    if config.gpus and not config.use_vllm:
        complain(f"--gpus {config.gpus} has no effect: the engine runs on --device")
    if config.interactive:
        check_asked(config.asked_options())
        files = None
    else:
        files = BatchFiles(config)
    if config.is_engine:
        _refuse(dialled, "is for a router or a gateway as --endpoint: leave it out")
        # Imports the router.
        from penstock.cli.infer.engine_router import EngineRouter

        with (
            EngineRouter(config.base_model, config.endpoint or "") as address,
            RemoteTarget(config, ConnectionConfig(address=address)) as engines,
        ):
            return converse(config, engines) if config.interactive else LineBatch(config, engines, files).run()
    if config.use_vllm:
        check_vllm()
        with VllmTarget(config, engine) as vllm:
            return LineBatch(config, vllm, files).run()
    if config.is_batch:
        connection = from_env_and_flags(ConnectionConfig, {**dialled, "address": config.endpoint})
        with BatchTarget(config, connection) as gateway:
            return LineBatch(config, gateway, files).run()
    if config.endpoint:
        connection = from_env_and_flags(ConnectionConfig, {**dialled, "address": config.endpoint})
        with RemoteTarget(config, connection) as remote:
            return converse(config, remote) if config.interactive else LineBatch(config, remote, files).run()
    _refuse(dialled, "is for an --endpoint: give one, or leave it out")
    with LocalTarget(config, engine) as local:
        return converse(config, local) if config.interactive else LineBatch(config, local, files).run()


def _refuse(dialled: Overrides, why: str) -> None:
    """Raise StartupError naming the first flag of a connection that is given, if any is."""
    if dialled:
        flag = next(bound.flag for bound in options_of(ConnectionConfig) if bound.name in dialled)
        raise StartupError(f"{flag} {why}", flag=flag)


def _with_one_adapter(config: InferConfig, engine: dict[str, Any]) -> InferConfig:
    """Return `config` with the only adapter of --lora as the one that requests use, unless --adapter names one."""
    loras = engine.get("lora")
    if isinstance(loras, list) and len(loras) == 1 and config.adapter is None:
        return replace(config, adapter=str(loras[0]).partition("=")[0])
    return config


def _run(given: Overrides) -> None:
    raise typer.Exit(run_infer(given))


_OPTIONS = [*options_of(InferConfig), *engine_options(), *connection_options()]
commands = typer.Typer(add_completion=False)
commands.command(
    "infer",
    epilog=EPILOG,
    # The script's spelling of flags, and ours.
    context_settings={"token_normalize_func": flag_of},
)(
    command(
        # The script's flags come first.
        sorted(_OPTIONS, key=lambda bound: bound.settings.group not in (MODEL, PROMPTS, OUTPUT, ENDPOINT)),
        _run,
    )
)
