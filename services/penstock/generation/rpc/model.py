"""ModelService: facts about the served model, its device and its limits."""

from __future__ import annotations

from typing import Any

import grpc

from penstock.generation.options.validate import check_model
from penstock.generation.service import GenerationCore, Lifecycle
from penstock.generation.wire import convert
from penstock.generation.wire.options import from_options
from penstock.v1 import common_pb2, config_pb2, model_pb2, model_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """ModelService over one Lifecycle."""

    def __init__(self, lifecycle: Lifecycle, max_message_bytes: int) -> None:
        self._lifecycle = lifecycle
        self._max_message_bytes = max_message_bytes

    async def GetModelInfo(
        self, request: model_pb2.GetModelInfoRequest, context: Context
    ) -> model_pb2.GetModelInfoResponse:
        """Return the facts; while the model loads only its name, state and percentage."""
        lifecycle = self._lifecycle
        check_model(request.model, lifecycle.model_name)
        response = model_pb2.GetModelInfoResponse(
            model=lifecycle.model_name,
            state=convert.from_state(lifecycle.state.value),
            percent_loaded=lifecycle.percent_loaded,
        )
        if lifecycle.core is not None:
            response.MergeFrom(self._describe(lifecycle.core))
        return response

    def _describe(self, core: GenerationCore) -> model_pb2.GetModelInfoResponse:
        loaded = core.loaded
        config, defaults = loaded.model.config, loaded.defaults
        return model_pb2.GetModelInfoResponse(
            architecture=config.architecture,
            model_type=config.model_type,
            dtype=convert.from_dtype(str(loaded.model.dtype)),
            devices=[loaded.device.describe()],
            world_size=1,
            kv=_geometry(core),
            limits=self._limits(core),
            eos_token_ids=defaults.eos_token_ids,
            bos_token_id=_first(defaults.bos_token_id, config.bos_token_id),
            pad_token_id=_first(defaults.pad_token_id, config.pad_token_id),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_heads,
            num_parameters=config.num_parameters,
            tokenizer_fingerprint=loaded.served.tokenizer_fingerprint,
            assistant_model=loaded.served.assistant_model,
            default_config=from_options(defaults.options),
            default_stop=config_pb2.StopConfig(
                stop_strings=defaults.stop_strings,
                stop_token_ids=[common_pb2.TokenIds(ids=ids) for ids in defaults.eos_sequences],
            ),
        )

    def _limits(self, core: GenerationCore) -> model_pb2.Limits:
        engine, limits = core.loaded.engine_config, core.limits
        return model_pb2.Limits(
            max_context_tokens=core.loaded.served.max_context_tokens,
            max_queued_requests=engine.max_queued_requests,
            max_running_sequences=engine.max_running_sequences,
            max_batch_tokens=engine.max_batch_tokens,
            max_return_sequences=limits.max_return_sequences,
            max_top_logprobs=limits.max_top_logprobs,
            max_stop_strings=limits.max_stop_strings,
            max_logit_bias=limits.max_logit_bias,
            max_message_bytes=self._max_message_bytes,
        )


def _geometry(core: GenerationCore) -> model_pb2.KvGeometry:
    kv = core.loaded.kv
    return model_pb2.KvGeometry(
        num_blocks=kv.num_blocks,
        block_size=kv.block_size,
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        dtype=convert.from_dtype(str(kv.dtype)),
        bytes_per_block=kv.bytes_per_block,
        total_bytes=kv.num_bytes,
    )


def _first(ours: int | None, theirs: int | None) -> int | None:
    return theirs if ours is None else ours
