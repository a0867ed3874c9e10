"""The storage of quantized modules in a checkpoint, a file for each method."""
