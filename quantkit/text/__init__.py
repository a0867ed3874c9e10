"""Load, compare and export tokenizers."""
