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
from penstock.router.engines.vllm_inference_codec import VllmInferenceCodec
from penstock.serving.transport import Channel
from penstock.v1 import tokenizer_pb2

# Its keys are router.backend_targets.ENGINE_SCHEMES.
# An engine is asked by the protocols of its kind in this order, and spoken to by the first that it has.
CODECS: dict[str, tuple[Callable[[], EngineCodec], ...]] = {
    "vllm": (VllmCodec, VllmInferenceCodec),
    "sglang": (SglangCodec,),
}


def connect(
    target: str, channel: Channel, config: RouterConfig, tokenizer: Callable[[], tokenizer_pb2.GetTokenizerResponse]
) -> BackendConnection:
    """Make the connection of a channel to the backend that `target` names. `tokenizer` returns the facts of ours."""
    scheme = scheme_of(target)
    if not scheme:
        return OwnConnection(channel, config)
    return EngineConnection(channel, config, [make() for make in CODECS[scheme]], target, tokenizer)
