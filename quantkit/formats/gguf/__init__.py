"""GGUF, the format of llama.cpp: reader, writer, names of tensors, and settings."""
