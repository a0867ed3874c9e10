"""The parts of a chat model's answer: its reasoning, the content, and calls of tools."""
