"""Quantize a checkpoint, check the result, and write its card and manifest."""
