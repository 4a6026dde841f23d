"""Making of the embedded demo model: tokenizer, rendering, batches, training and evaluation."""
