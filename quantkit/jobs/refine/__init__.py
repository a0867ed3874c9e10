"""Train the scales of a quantized model, and apply deltas."""
