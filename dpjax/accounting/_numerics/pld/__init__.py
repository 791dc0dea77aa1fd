"""What `pld` computes with, each step an upper bound of the one before.

1. `pairs`: the mechanism of a step as discrete losses, easier to tell apart than it is.
   `overflow`: the same for a Poisson batch that may not fit its shape.
2. `tilt`: where to look, given about what is asked. It may be wrong, not unsound.
3. `inversion`: δ(ε) of the composed losses from their characteristic function.
4. `composition`: δ(ε) and ε(δ) with derivatives, in the worse direction.
"""
