"""What is wrong with anybody's folder: rules by theme, over a view of it that nothing breaks."""
