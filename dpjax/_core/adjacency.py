"""Which pairs of data sets a guarantee compares."""

import enum


class Adjacency(enum.Enum):
    """The neighbouring relation that a guarantee is stated for.

    A guarantee that does not name its relation means little: without random sampling
    the same run has twice the μ under `REPLACE` that it has under `ZERO_OUT`.

    Attributes:
      ADD_REMOVE: one data set has one example more. The batch that any other
        example falls into must not depend on it.
      ZERO_OUT: one example's contribution is replaced by zero; sizes, order and
        batches stay what they are.
      REPLACE: one example is replaced by another one.

    Example:
      >>> Adjacency.REPLACE.sensitivity_factor
      2.0
      >>> Adjacency("replace")
      Adjacency.REPLACE
    """

    ADD_REMOVE = "add_remove"
    ZERO_OUT = "zero_out"
    REPLACE = "replace"

    def __repr__(self) -> str:
        """What one writes in a program."""
        return f"Adjacency.{self.name}"

    @property
    def sensitivity_factor(self) -> float:
        """How far one example moves a sum, in units of the clip norm."""
        return 2.0 if self is Adjacency.REPLACE else 1.0
