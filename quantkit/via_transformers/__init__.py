"""Models that transformers runs: built without weights, which are read part by part; all samples pass in lockstep."""
