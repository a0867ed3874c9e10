"""The decoder through JAX and XLA: TPUs, or any number of virtual CPU devices. Modules here import jax."""
