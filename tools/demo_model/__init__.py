"""How the embedded demo model is made: tokenizer, rendering, batches, training and evaluation."""
