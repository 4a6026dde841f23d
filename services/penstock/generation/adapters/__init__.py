"""LoRA adapters: PEFT folders, and the store of those that are in memory."""
