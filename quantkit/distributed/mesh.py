"""Processes in two dimensions: those that share a model, and copies of these for other samples."""

from __future__ import annotations

from dataclasses import dataclass

from quantkit.distributed.group import SINGLE, ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """The processes of a job.

    Attributes:
        world: all of them.
        data: those that have the same part of the model as this one, and other samples.
        model: those that share the model with this one, on the same samples.
    """

    world: ProcessGroup = SINGLE
    data: ProcessGroup = SINGLE
    model: ProcessGroup = SINGLE

    @classmethod
    def of(cls, world: ProcessGroup, shape: tuple[int, int]) -> Mesh:
        """Arrange processes in a mesh of a shape, which has as many places as there are processes;
        the processes of a model have adjacent numbers, as those of one machine have.
        """
        return cls(world, *world.axes(*shape))


ALONE = Mesh()
"""A process that is alone."""
