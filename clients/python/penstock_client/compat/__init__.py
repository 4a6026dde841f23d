"""Other systems' APIs over this client, which knows none of them: a folder each."""
