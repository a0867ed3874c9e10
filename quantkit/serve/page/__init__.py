"""The server's page: a chat in the browser, and what the model's folder states about it."""
