"""Generation: sampling and the token loop."""
