"""Load a model and run prompts through it, from files, from Python, or by Meta's interface."""
