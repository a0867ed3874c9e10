"""Grammars that answers must follow, from JSON schemas.

They need the package llguidance, which is imported when a grammar is compiled.
"""
