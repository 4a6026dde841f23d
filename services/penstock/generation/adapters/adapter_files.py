"""The two files of an adapter as PEFT saves it, wherever they lie."""

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
BOTH_FILES = (CONFIG_FILE, WEIGHTS_FILE)
# Bytes of the first.
MOST_CONFIG_BYTES = 1 << 20
