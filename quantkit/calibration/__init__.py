"""Calibration: text to tokens, tokens through the model block by block, and a solver for each
layer.
"""
