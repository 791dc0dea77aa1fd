"""The relations between the two data sets that a guarantee compares."""

import enum


class Adjacency(enum.Enum):
    """The relation between the two data sets that a guarantee compares.

    A guarantee means little unless it names its relation. For instance, if a run
    without random sampling is μ-GDP (Gaussian differential privacy) under `ZERO_OUT`,
    then the same run is 2μ-GDP under `REPLACE`.

    Attributes:
      ADD_REMOVE: one data set has one example more than the other. No other example's
        batch may depend on whether this example is in the data set.
      ZERO_OUT: one example's contribution is replaced by zero. The size of the data
        set, the order of the examples and the batches do not change.
      REPLACE: one example is replaced by another example.

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
        """The member as a Python expression."""
        return f"Adjacency.{self.name}"

    @property
    def sensitivity_factor(self) -> float:
        """The L2 sensitivity of a sum of clipped gradients, in clip norms."""
        # Under REPLACE one clipped gradient leaves the sum and another one enters it.
        return 2.0 if self is Adjacency.REPLACE else 1.0
