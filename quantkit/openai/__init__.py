"""OpenAI's API as JSON: requests are parsed to prompts of a model, and completions are formatted as
responses. Nothing here knows of HTTP or of files; without torch, except the chunks of streams.
"""
