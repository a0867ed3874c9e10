"""What a model is: its config, its layers by role, its names on disk; no torch."""
