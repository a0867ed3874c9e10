"""Measuring models: perplexity and comparison tables."""
