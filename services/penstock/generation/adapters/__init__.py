"""LoRA adapters: PEFT folders, and the store of those in memory."""
