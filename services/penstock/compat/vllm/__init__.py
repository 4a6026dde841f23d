"""vLLM's gRPC protocol, served by a generation service."""
