"""Calls of an unmodified tritonclient against a router: `python main.py ADDRESS TEXT`. Prints a JSON object.

It runs in an environment of its own: tritonclient brings its own stubs of KServe's service, and its own protobuf.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def text_input(text: str) -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
    return tensor


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output")[0].decode())


def infer(client: Any, text: str) -> dict[str, Any]:
    """A call that waits, one that does not, one with options as vLLM's backend takes them, and one that is wrong."""
    parameters = {"max_tokens": 24}
    result = client.infer("", [text_input(text)], request_id="one", parameters=parameters)
    answers: queue.Queue[Any] = queue.Queue()
    client.async_infer(
        "", [text_input(text)], callback=lambda result, error: answers.put((result, error)), parameters=parameters
    )
    later, error = answers.get(timeout=120)
    assert error is None, error
    sampling = triton.InferInput("sampling_parameters", [1], "BYTES")
    sampling.set_data_from_numpy(np.array([json.dumps({"max_tokens": 2}).encode()], dtype=object))
    outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "finish_reason", "num_output_tokens")]
    short = client.infer("", [text_input(text), sampling], outputs=outputs)
    try:
        client.infer("", [text_input(text)], parameters={"top_p": 7.0})
        refused = ""
    except InferenceServerException as caught:
        refused = f"{caught.status()} {caught.message()}"
    return {
        "infer": text_of(result),
        "id": result.get_response().id,
        "async_infer": text_of(later),
        "short": [short.as_numpy("finish_reason")[0].decode(), int(short.as_numpy("num_output_tokens")[0])],
        "refused": refused,
    }


def stream(client: Any, text: str) -> dict[str, Any]:
    """A stream with a good and a bad request, and one that is cancelled in the middle."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("", [text_input(text)], request_id="a", parameters={"max_tokens": 24, "stream": True})
    client.async_stream_infer("nothing", [text_input(text)], request_id="b")
    pieces, errors, is_final = [], [], False
    while not (is_final and errors):
        result, error = answers.get(timeout=120)
        if error is not None:
            errors.append(error.message())
            continue
        pieces.append(text_of(result))
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    parameters = {"max_tokens": 500, "ignore_eos": True, "stream": True}
    client.async_stream_infer("", [text_input(text)], request_id="c", parameters=parameters)
    answers.get(timeout=120)
    client.stop_stream(cancel_requests=True)
    return {"pieces": pieces, "errors": errors}


def describe(client: Any) -> dict[str, Any]:
    metadata, config = client.get_model_metadata(""), client.get_model_config("").config
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready() and client.is_model_ready(""),
        "server": client.get_server_metadata().name,
        "inputs": [[tensor.name, tensor.datatype, list(tensor.shape)] for tensor in metadata.inputs],
        "config": [[tensor.name, tensor.data_type, list(tensor.dims)] for tensor in config.input],
        "decoupled": config.model_transaction_policy.decoupled,
    }


def numbers() -> dict[str, dict[str, int]]:
    """Field numbers that tritonclient was built with, by message."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    messages: dict[str, dict[str, int]] = {}

    def add(descriptor: Any) -> None:
        messages[descriptor.full_name] = {field.name: field.number for field in descriptor.fields}
        for nested in descriptor.nested_types:
            add(nested)

    for file in (service_pb2, model_config_pb2):
        for descriptor in file.DESCRIPTOR.message_types_by_name.values():
            add(descriptor)
    return messages


def main() -> None:
    address, text = sys.argv[1:]
    with triton.InferenceServerClient(address) as client:
        print(
            json.dumps(
                {**infer(client, text), **stream(client, text), **describe(client), "numbers": numbers()},
                ensure_ascii=False,
            )
        )


if __name__ == "__main__":
    main()
