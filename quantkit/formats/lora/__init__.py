"""LoRA adapters in PEFT's format, merged into the weights of their base model."""
