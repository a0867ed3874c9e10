"""What every package uses: checks of arguments, JSON, progress, limits of the machine."""
