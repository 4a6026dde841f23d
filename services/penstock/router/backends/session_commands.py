"""Packing of a session's commands: few messages for many commands.

grpc.aio writes one message of a call at a time, and takes several turns of the event loop for each. Where the loop is
behind, commands that went one by one would wait for seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.v1 import generation_pb2

# A message takes as many bytes, unless its only command has more; far below the largest message.
_MOST_BYTES = 256 << 10


def packed(commands: Sequence[generation_pb2.SessionRequest]) -> list[generation_pb2.SessionRequest]:
    """Return messages with these commands, in their order. The commands are not to be used any more."""
    if len(commands) < 2:
        return list(commands)
    messages: list[generation_pb2.SessionRequest] = []
    some: list[generation_pb2.SessionRequest] = []
    room = _MOST_BYTES
    for command in commands:
        size = command.ByteSize()
        if some and size > room:
            messages.append(_message(some))
            some, room = [], _MOST_BYTES
        some.append(command)
        room -= size
    messages.append(_message(some))
    return messages


def _message(commands: Sequence[generation_pb2.SessionRequest]) -> generation_pb2.SessionRequest:
    if len(commands) == 1:
        return commands[0]
    return generation_pb2.SessionRequest(commands=generation_pb2.SessionCommands(commands=commands))
