"""The decoder through torchax into XLA, for TPUs: split among devices, and run as two compiled programs, one for a
prompt and one for a chunk of new tokens. Only jobs import this room, and most of it needs jax.
"""
