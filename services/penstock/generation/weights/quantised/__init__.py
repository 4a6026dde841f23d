"""Quantised checkpoints as found on hubs: one file per format, and the table of formats."""
