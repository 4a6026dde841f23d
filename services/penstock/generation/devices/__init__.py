"""The devices that a model runs on."""

# Values of --kernels.
KERNELS = ("auto", "native", "torch")
