"""Training of a quantized model's scales, codes and norms against the logits of its float model."""
