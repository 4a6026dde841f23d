"""The devices that a model runs on."""

import re

# Values of --kernels.
KERNELS = ("auto", "native", "torch")
COMPACT_WEIGHTS = ("auto", "on", "off")
# Values of --device: the kind, and the number among several.
DEVICE_NAME = re.compile(r"(auto|cpu|(cuda|npu)(?::(\d{1,3}))?)")
DEVICE_WORDS = "auto, cpu, cuda, cuda:NUMBER, npu or npu:NUMBER"
