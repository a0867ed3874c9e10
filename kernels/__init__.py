"""Quantized matrix products: one named backend per file, chosen by `dispatch`."""
