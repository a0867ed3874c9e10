"""Kinds of checkpoints, a reader and a writer for each."""
