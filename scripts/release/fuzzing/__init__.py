"""What `scripts/release/fuzz.py` is made of: base models, mutations, the independent reading,
trials, workers.
"""
