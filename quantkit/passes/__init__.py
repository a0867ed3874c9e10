"""Run a model part by part: batches of samples pass through it in lockstep, each part's weights are
in memory only while samples are in it, and linears show their inputs.
"""
