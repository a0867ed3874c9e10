"""Solvers: tensors in, codes and scales out, independent of models."""
