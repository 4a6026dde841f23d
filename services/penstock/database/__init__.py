"""Transactions on a thread of their own: SQLite for one machine, PostgreSQL for several."""
