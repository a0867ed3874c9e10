"""Files that ship with quantkit: the demo model and an excerpt to measure on."""
