"""Training of scales over a mesh of devices in two dimensions, compiled by XLA."""
