"""A gRPC server on asyncio alone, for services that write many small messages to many streams.

grpc.aio pays system calls and a thread switch for every message. Here one system call sends all messages that a
connection's streams write in one turn of the event loop. It is plain HTTP/2 (RFC 9113) and gRPC's use of it; header
compression comes from the hpack package.
"""
