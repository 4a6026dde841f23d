"""Number formats of linear layers."""

# Of --quantization, where it is not `auto`.
QUANTIZATIONS = ("none", "int8", "int4")
