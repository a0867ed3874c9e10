"""Tokenizers: loading, comparing, exporting."""
