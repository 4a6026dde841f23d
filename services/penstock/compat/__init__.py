"""Other systems' APIs over the core, which knows none of them: a folder each."""
