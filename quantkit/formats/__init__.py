"""Checkpoints on disk: readers and writers, one file per format."""
