"""Commands `penstock keys`: the file of keys, and the keys of a running router."""
