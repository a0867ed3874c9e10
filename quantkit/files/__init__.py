"""Files that hold tensors: opened strictly, read by position, written by appending."""
