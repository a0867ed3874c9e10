"""Several processes at one job, as ``torchrun`` starts them: their group, and each one's shard of a
checkpoint. Code that works for a group takes it as an argument; the decoder is not known here.
"""
