"""An evaluation as one self-contained HTML page: it loads nothing, and can be read without
scripts.
"""
