"""Which layer gets how many bits: the schemes that lose least for a size, found from calibration samples."""
