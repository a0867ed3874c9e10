"""The decoder, its cache and rotary embedding, and how a checkpoint fills it."""
