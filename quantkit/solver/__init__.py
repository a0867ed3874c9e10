"""Solvers: tensors in, codes and scales out; they know no model."""
