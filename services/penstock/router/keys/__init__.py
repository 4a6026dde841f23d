"""Keys of callers: what each may do, how much, and the ledger of what it used."""
