"""Command `penstock infer`: a file of prompts, or a conversation, over a model in this process or behind a router."""
