"""Accuracy of a model's numbers: a text read by it and by a reference, and the differences between the two."""
