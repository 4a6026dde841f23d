"""Number formats of linear layers."""

# Values of --quantization besides `auto`.
QUANTIZATIONS = ("none", "int8", "int8-groups", "int4")
# One of them, of the CPU's C++ kernels alone.
INT8_GROUPS = "int8-groups"
# One more, of --device cuda alone.
FP8 = "fp8"
