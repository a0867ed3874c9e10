"""Choose each layer's scheme: the smallest loss for a size, estimated on calibration samples."""
