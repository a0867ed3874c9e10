"""Models on more than one device."""
