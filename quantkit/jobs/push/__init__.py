"""Push a model to a repository on a model hub."""
