"""Commands `penstock debug`: the state of a generation service's engine, and a request's way (trace.py)."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.client.connection import (
    GENERATION_HINT,
    ConnectionConfig,
    about_own_flag,
    connect,
    no_router,
    wait_connected,
)
from penstock.cli.client.connection import GROUP as CONNECTION
from penstock.cli.console import console
from penstock.cli.engine_state import State, state_text
from penstock.cli.flags import Overrides, argument, command
from penstock.cli.trace import EPILOG as TRACE_EPILOG
from penstock.cli.trace import TraceConfig, run_trace
from penstock.common.options import option, options_of
from penstock.common.ports import GENERATION_PORT

if TYPE_CHECKING:
    import grpc
    from penstock_client import ClientConfig

EPILOG = """No token, text or request id is shown: a request is the first 12 digits of its id's
SHA-256 (printf %s ID | sha256sum | cut -c1-12).
docs/learn/engine.md explains the words.

Examples:

  penstock debug state --address 127.0.0.1:50052

  penstock debug state --address 127.0.0.1:50050 --backend 127.0.0.1:50052   through a router

  penstock debug state --json"""

# Time for a service that waits for its engine for as long as its own configuration allows.
_UNKNOWN_WAIT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class DebugConfig(ConnectionConfig):
    """Configuration: a generation service, the way to it, and the form of the output."""

    # These options have their own variables: the plain names are for the router's address and `penstock bench`'s file.
    address: str = option(
        f"127.0.0.1:{GENERATION_PORT}",
        "host:port of the generation service, or of a router, which asks a backend.",
        group=CONNECTION,
        env="PENSTOCK_DEBUG_ADDRESS",
        metavar="HOST:PORT",
    )
    backend: str | None = option(
        None,
        "Backend for the router to ask, if it has several: its address, or its name in the router's own --backend.",
        group=CONNECTION,
        env="PENSTOCK_DEBUG_BACKEND",
        metavar="NAME_OR_ADDRESS",
    )
    wait_seconds: float | None = option(
        None,
        "Time for the engine to answer between two steps, by default its own --dump-wait-seconds; after that the "
        "state is read from outside.",
        group="State",
        env="PENSTOCK_DEBUG_WAIT_SECONDS",
        minimum=0,
        maximum=3600,
    )
    json: bool = option(False, "Write it as JSON.", group="State", env="PENSTOCK_DEBUG_JSON")

    @property
    def answer_seconds(self) -> float:
        """Time that the whole call may take: a service that hangs must not hang the command."""
        wait = _UNKNOWN_WAIT_SECONDS if self.wait_seconds is None else self.wait_seconds
        return wait + self.connect_timeout_seconds


def run_state(given: Overrides) -> None:
    """Ask for the state and show it.

    Raises StartupError without an answer, or when --backend is missing or wrong; the service's PenstockError.
    """
    from penstock.common.config import from_env_and_flags

    config = from_env_and_flags(DebugConfig, given)
    state = asyncio.run(_ask(config))
    if config.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        console().print(state_text(state), markup=False, end="", soft_wrap=True)


async def _ask(config: DebugConfig) -> State:
    import grpc
    from google.protobuf import json_format

    from penstock.common.errors import from_rpc_error
    from penstock.common.request_context import BACKEND_KEY
    from penstock.v1 import admin_pb2, admin_pb2_grpc

    def opened(client: ClientConfig) -> tuple[grpc.aio.Channel, Any]:
        options, metadata = client.channel_options(config.address), client.metadata(config.address)
        if client.tls:
            return grpc.aio.secure_channel(config.address, client.tls.credentials(), options), metadata
        return grpc.aio.insecure_channel(config.address, options), metadata

    channel, metadata = connect(config, opened)
    async with channel:
        await wait_connected(channel, config, GENERATION_HINT)
        stub: Any = admin_pb2_grpc.GenerationAdminServiceStub(channel)
        if config.backend is not None:
            await _require_router(config, channel, metadata)
            metadata = (*metadata, (BACKEND_KEY, config.backend))
        try:
            answer = await stub.DumpState(
                admin_pb2.DumpStateRequest(wait_seconds=config.wait_seconds),
                metadata=metadata,
                timeout=config.answer_seconds,
            )
        except grpc.RpcError as error:
            raise about_own_flag(from_rpc_error(error)) from None
    state: State = json_format.MessageToDict(
        answer.state, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _with_numbers(state)


async def _require_router(config: DebugConfig, channel: grpc.aio.Channel, metadata: Any) -> None:
    """Check that the address is a router's: a generation service ignores --backend and answers for itself."""
    import grpc

    from penstock.common.errors import Unimplemented, from_rpc_error
    from penstock.v1 import text_pb2, text_pb2_grpc

    stub: Any = text_pb2_grpc.TextServiceStub(channel)
    try:
        await stub.ListModels(text_pb2.ListModelsRequest(), metadata=metadata, timeout=config.answer_seconds)
    except grpc.RpcError as error:
        # Other errors also come from a router, such as one about its operators' token.
        if isinstance(from_rpc_error(error), Unimplemented):
            raise no_router(config) from None


def _with_numbers(state: State) -> State:
    """Turn texts into numbers: JSON of protobuf has 64-bit integers as text."""
    state["counters"] = {name: int(value) for name, value in sorted(state["counters"].items())}
    state["config"] = dict(sorted(state["config"].items()))
    state["pool"]["references"] = int(state["pool"]["references"])
    state["last_step"]["number"] = int(state["last_step"]["number"])
    for group in (*state["running"], *state["waiting"]):
        for sequence in group["sequences"]:
            sequence["number"] = int(sequence["number"])
    return state


commands = typer.Typer(no_args_is_help=True, add_completion=False)
commands.command("state", epilog=EPILOG)(
    command(
        options_of(DebugConfig),
        run_state,
        "Show what a generation service's engine holds and does: requests, blocks, the last step. Changes nothing.",
    )
)
commands.command("trace", epilog=TRACE_EPILOG)(
    command(
        options_of(TraceConfig),
        run_trace,
        "Show a request's way through the services, as spans that --tracing-endpoint file:FILE kept.",
        first=[argument("path", "FILE", "File of traces.", default=...)],
    )
)
