"""The embedded demo model: its corpus, its training and its card. `python -m dev.demo.train` makes it again."""
