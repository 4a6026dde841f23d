"""A client of another release: knows the protos of a descriptor set alone. Streams while services are restarted.

    python baseline_client.py DESCRIPTORS ADDRESS END

Takes one answer, and then the same request again and again, four at a time, until the file END is there: each must have
the first one's ids. Prints a line at the first answer and behind each of the others, and a JSON object at the end.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

AT_ONCE, TOKENS = 4, 400
SERVICE = "penstock.v1.TextService"


def main() -> None:
    descriptors, address, end = sys.argv[1:]
    files = descriptor_pb2.FileDescriptorSet.FromString(Path(descriptors).read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    asked, answered = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"penstock.v1.GenerateText{name}"))
        for name in ("Request", "Response")
    )
    fields: dict[str, Any] = {"text": "The capital of France is", "config": {"max_new_tokens": TOKENS}}
    request = json_format.ParseDict(
        {**fields, "stop": {"ignore_eos": True}, "output": {"return_token_ids": True}}, asked()
    )
    with grpc.insecure_channel(address) as channel:
        generate = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )

        def ask() -> tuple[list[int], int]:
            """Return the ids of an answer, and the attempts that it took."""
            ids: list[int] = []
            attempts = 0
            for event in generate(request, wait_for_ready=True, timeout=300):
                ids += event.delta.token_ids
                if event.HasField("finished"):
                    attempts = event.finished.attempts
            return ids, attempts

        expected, _ = ask()
        print("first", len(expected), flush=True)
        streams = moved = 0
        with ThreadPoolExecutor(AT_ONCE) as threads:
            while not Path(end).exists():
                for ids, attempts in threads.map(lambda _: ask(), range(AT_ONCE)):
                    assert ids == expected, f"{len(ids)} of {len(expected)} tokens, or others"
                    streams, moved = streams + 1, moved + (attempts > 1)
                print("streams", streams, flush=True)
    print(json.dumps({"tokens": len(expected), "streams": streams, "moved": moved}))


if __name__ == "__main__":
    main()
