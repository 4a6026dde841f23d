"""No RPC answers UNIMPLEMENTED: each servicer carries out every method of its service, forwarded ones included."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.compat.vllm.engine_servicer import VllmEngineServicer
from penstock.engines import vllm_engine_pb2
from penstock.gateway.jobs_servicer import JobsServicer
from penstock.generation.rpc.admin import AdminServicer
from penstock.generation.rpc.generation import GenerationServicer
from penstock.generation.rpc.model import ModelServicer
from penstock.router.frontend.forwarding import ForwardingAdminServicer, ForwardingModelServicer
from penstock.router.frontend.router_admin import RouterAdminServicer
from penstock.router.frontend.servicer import TextServicer
from penstock.tokenizer.servicer import TokenizerServicer
from penstock.v1 import admin_pb2, generation_pb2, jobs_pb2, model_pb2, router_pb2, text_pb2, tokenizer_pb2

SERVICERS: dict[type, tuple[Any, str]] = {
    AdminServicer: (admin_pb2, "GenerationAdminService"),
    GenerationServicer: (generation_pb2, "GenerationService"),
    ModelServicer: (model_pb2, "ModelService"),
    ForwardingAdminServicer: (admin_pb2, "GenerationAdminService"),
    ForwardingModelServicer: (model_pb2, "ModelService"),
    JobsServicer: (jobs_pb2, "JobsService"),
    RouterAdminServicer: (router_pb2, "RouterAdminService"),
    TextServicer: (text_pb2, "TextService"),
    TokenizerServicer: (tokenizer_pb2, "TokenizerService"),
    VllmEngineServicer: (vllm_engine_pb2, "VllmEngine"),
}


def left_out(servicer: type, methods: list[str]) -> list[str]:
    """Return the methods that neither the class nor a base other than the generated one defines."""
    written = (one for one in servicer.__mro__ if not one.__module__.startswith(("penstock.v1.", "penstock.engines.")))
    defined = {name for one in written for name in vars(one)}
    return [name for name in methods if name not in defined]


@pytest.mark.parametrize("servicer", SERVICERS, ids=lambda servicer: servicer.__name__)
def test_every_method_of_its_service_is_carried_out(servicer: type) -> None:
    stubs, service = SERVICERS[servicer]
    methods = [one.name for one in stubs.DESCRIPTOR.services_by_name[service].methods]
    assert methods
    assert not left_out(servicer, methods)


def test_a_method_that_is_left_out_would_be_seen() -> None:
    assert left_out(TextServicer, ["Chat", "Sing"]) == ["Sing"]
