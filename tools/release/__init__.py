"""A release: its version, its artefacts, and the facts about them. `make release` runs it (docs/learn/release.md)."""
