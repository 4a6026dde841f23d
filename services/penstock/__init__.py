"""Penstock: Hugging Face's generate(), continuously batched over one paged KV pool, behind gRPC services."""

__version__ = "0.1.0"
