"""The model through torchax into XLA, for TPUs; nothing imports it but the jobs that ask for it."""
