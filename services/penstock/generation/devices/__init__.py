"""Where a model runs."""

# Of --kernels.
KERNELS = ("auto", "native", "torch")
