"""Several processes at one job, as ``torchrun`` starts them: their group, each one's shard of a checkpoint, and the
collectives within a model. Whoever works for a group is given it; the decoder is not known here.
"""
