"""vLLM's own services without a model: vllm.Inference, vllm.Control and health, over scripted ids."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
from factories.servers.scripted_engine import Aborted, ScriptedEngine, prompt_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from penstock.engines import (
    vllm_control_pb2,
    vllm_control_pb2_grpc,
    vllm_inference_pb2_grpc,
)
from penstock.engines.vllm_inference_pb2 import FinishInfo, GenerateResponse, PromptInfo, SequenceOutput


class ScriptedInference(ScriptedEngine):
    """Engine as ScriptedEngine, behind vLLM's own protocol: the prompt's facts first, the end with the last token."""

    # False: it has no standard health service.
    has_health = True
    # True: the health service knows its protocol no more.
    is_withdrawn = False

    def add_services(self, server: Any) -> None:
        """See ScriptedEngine."""
        vllm_inference_pb2_grpc.add_InferenceServicer_to_server(_Inference(self), server)
        vllm_control_pb2_grpc.add_ControlServicer_to_server(_Control(self), server)
        if self.has_health:
            health_pb2_grpc.add_HealthServicer_to_server(_Health(self), server)


class _Inference(vllm_inference_pb2_grpc.InferenceServicer):
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def GenerateStream(self, request: Any, context: Any) -> None:  # type: ignore[override]
        engine = self._engine
        engine.requests.append(request)
        if engine.refuse is not None:
            await context.abort(engine.refuse, "the engine's own words")
        engine.live.add(request.request_id)
        await engine.notify()
        try:
            number = 0
            async for message in self._messages(request):
                for told in engine.tell(message, number) if engine.tell else (message,):
                    await context.write(told)
                number += 1
        finally:
            engine.live.discard(request.request_id)
            # Shielded: a call that is cancelled is news, too.
            await asyncio.shield(engine.notify())

    async def _messages(self, request: Any) -> AsyncIterator[GenerateResponse]:
        engine, stopping, response = self._engine, request.stopping, request.response
        prompt = prompt_of(request)
        info = PromptInfo(num_prompt_tokens=len(prompt))
        if response.prompt_token_ids:
            info.token_ids.extend(prompt)
        if response.prompt_logprobs:
            for at, token_id in enumerate(prompt):
                _add_logprobs(info, token_id, response.prompt_candidates.top_n, is_first=at == 0)
        # They come with the first step.
        await engine.until(lambda: engine.allowance != 0 or request.request_id in engine.aborted)
        yield GenerateResponse(prompt_info=info)
        ids = list(engine.script(request))[: stopping.max_new_tokens]
        for number, token_id in enumerate(ids, 1):
            output = SequenceOutput(num_tokens=1)
            try:
                await engine.take_step(request.request_id)
            except Aborted:
                ended = FinishInfo(num_output_tokens=number - 1, finish_reason=FinishInfo.ABORTED)
                yield GenerateResponse(outputs=SequenceOutput(finish_info=ended))
                return
            if response.output_token_ids:
                output.token_ids.append(token_id)
            if response.output_logprobs:
                _add_logprobs(output, token_id, response.output_candidates.top_n)
            is_stop = token_id in stopping.stop_token_ids
            if is_stop or number == len(ids):
                output.finish_info.CopyFrom(self._end(token_id, number, stopping, is_stop=is_stop))
            yield GenerateResponse(outputs=output)
            if is_stop:
                return

    def _end(self, token_id: int, number: int, stopping: Any, *, is_stop: bool) -> FinishInfo:
        end = FinishInfo(num_output_tokens=number, finish_reason=FinishInfo.STOP)
        if is_stop:
            end.stop_token_id = token_id
        elif number == stopping.max_new_tokens:
            end.finish_reason = FinishInfo.LENGTH
        elif self._engine.stop_string:
            end.stop_string = self._engine.stop_string
        return end


def _add_logprobs(told: Any, token_id: int, alternatives: int, *, is_first: bool = False) -> None:
    """Add a position: a prompt's first token has zeros, and no candidates."""
    told.logprobs.append(0.0 if is_first else -0.5)
    told.ranks.append(0 if is_first else 2)
    candidates = told.candidate_tokens.add()
    if not is_first:
        for at in range(1, alternatives + 1):
            # The token itself is the second: it is not among the others.
            candidates.tokens.add(id=token_id + at, logprob=math.log(1 / at) - 0.3, rank=at if at == 1 else at + 1)


class _Control(vllm_control_pb2_grpc.ControlServicer):
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def Abort(self, request: Any, context: Any) -> Any:
        self._engine.aborted.extend(request.request_ids)
        await self._engine.notify()
        return vllm_control_pb2.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        engine = self._engine
        return vllm_control_pb2.ModelInfo(
            model_id=f"/models/{engine.model}",
            served_model_name=engine.model,
            supports_text_input=True,
            supports_token_ids_input=engine.generates,
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_control_pb2.ServerInfo(
            max_model_len=self._engine.max_context, kv_block_size=16, total_kv_blocks=1024, max_running_requests=8
        )


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    def __init__(self, engine: ScriptedInference) -> None:
        self._engine = engine

    async def Check(self, request: Any, context: Any) -> Any:
        self._engine.health_checks += 1
        await self._engine.notify()
        if self._engine.is_withdrawn or request.service != "vllm.Inference":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        status, is_serving = health_pb2.HealthCheckResponse, self._engine.healthy and self._engine.serving is not False
        return status(status=status.SERVING if is_serving else status.NOT_SERVING)
