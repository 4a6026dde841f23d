"""Packing of a session's commands."""

from __future__ import annotations

from penstock.router.backends.session_commands import _MOST_BYTES, packed
from penstock.v1 import generation_pb2


def submit(number: int, size: int = 0) -> generation_pb2.SessionRequest:
    request = generation_pb2.GenerateRequest(request_id=f"{number}", cache_salt="x" * size)
    return generation_pb2.SessionRequest(submit=request, handle=number)


def unpacked(messages: list[generation_pb2.SessionRequest]) -> list[generation_pb2.SessionRequest]:
    return [one for message in messages for one in message.commands.commands or (message,)]


def test_few_commands_are_one_message_in_their_order() -> None:
    commands = [submit(number) for number in range(20)]
    commands.append(generation_pb2.SessionRequest(abort=generation_pb2.SessionAbort(request_id="3")))
    messages = packed(commands)
    assert len(messages) == 1
    assert unpacked(messages) == commands


def test_a_single_command_goes_as_it_is() -> None:
    command = submit(1)
    assert packed([command]) == [command]
    assert packed([]) == []


def test_a_message_does_not_become_larger_than_it_may() -> None:
    commands = [submit(number, _MOST_BYTES // 3) for number in range(7)] + [submit(7, 2 * _MOST_BYTES), submit(8)]
    messages = packed(commands)
    assert unpacked(messages) == commands
    assert all(message.ByteSize() <= _MOST_BYTES + 64 or message.HasField("submit") for message in messages)
    assert 4 <= len(messages) <= 6
