"""Command line `penstock`."""
