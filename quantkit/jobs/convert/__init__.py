"""Convert a checkpoint to another format, sharding or float dtype."""
