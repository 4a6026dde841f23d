"""Number formats of linear layers."""

# Values of --quantization besides `auto`.
QUANTIZATIONS = ("none", "int8", "int4")
# One more, of --device cuda alone.
FP8 = "fp8"
