"""How quantized modules lie in a checkpoint, a file for each kind."""
