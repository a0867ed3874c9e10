"""Prompts of any protocol, checked and encoded into requests to a model; without torch."""
