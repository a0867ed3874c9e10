"""The jobs: thin, they join the rooms of the library."""
