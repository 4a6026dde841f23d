"""Kinds of backends by the scheme in --backend: `vllm://`, `vllm+k8s://`, `sglang://`; none is our own."""

from __future__ import annotations

from collections.abc import Callable

from penstock.router.backend_targets import scheme_of
from penstock.router.config import RouterConfig
from penstock.router.engines.backend_connection import BackendConnection
from penstock.router.engines.engine_codec import EngineCodec
from penstock.router.engines.engine_connection import EngineConnection
from penstock.router.engines.own_connection import OwnConnection
from penstock.router.engines.sglang_codec import SglangCodec
from penstock.router.engines.vllm_codec import VllmCodec
from penstock.serving.transport import Channel

# Its keys are router.backend_targets.ENGINE_SCHEMES.
CODECS: dict[str, Callable[[], EngineCodec]] = {"vllm": VllmCodec, "sglang": SglangCodec}


def connect(target: str, channel: Channel, config: RouterConfig) -> BackendConnection:
    """Make the connection of a channel to the backend that `target` names."""
    scheme = scheme_of(target)
    return EngineConnection(channel, config, CODECS[scheme](), target) if scheme else OwnConnection(channel, config)
