"""Quantised checkpoints as they are found on hubs: a file a format, and the table of formats."""
