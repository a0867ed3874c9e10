"""How an output folder comes to be: atomic, durable, resumable."""
