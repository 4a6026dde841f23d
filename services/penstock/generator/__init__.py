"""The engine in the caller's process: text, tokenizer, engine and answers, with no server between them."""
