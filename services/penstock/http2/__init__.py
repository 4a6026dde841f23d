"""A gRPC server on asyncio alone, for services that write many small messages to many streams.

grpc.aio pays system calls and a thread switch for every message. Here the messages that all streams of a connection
write in one turn of the event loop leave in one system call. Plain HTTP/2 (RFC 9113) and gRPC's use of it; header
compression is the hpack package's.
"""
