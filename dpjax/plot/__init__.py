"""Pictures of guarantees, runs and noise. They need the extra `plot`: matplotlib.

Each function draws on the `ax` that it is given, or on a new figure's, and hands it
back; none shows or saves anything. What is drawn is what the accountants say, point by
point. Lines differ in their strokes and markers, so that no picture needs its colours.

1. `tradeoff`: what an attack can achieve at most; `attack`: what one did achieve.
2. `epsilon_by_step`: what a run costs that stops early. `compare`: plans side by side.
   `comparison`: the mechanisms that a plan was chosen from.
3. `noise` and `spectrum`: how large noise is from step to step, and how it is spread
   over slow and fast changes.
4. `explain`: the table of `dpjax.explain`.
"""

from dpjax.plot._attack import attack as attack
from dpjax.plot._runs import compare as compare
from dpjax.plot._runs import comparison as comparison
from dpjax.plot._runs import epsilon_by_step as epsilon_by_step
from dpjax.plot._shapes import noise as noise
from dpjax.plot._shapes import spectrum as spectrum
from dpjax.plot._table import explain as explain
from dpjax.plot._tradeoff import tradeoff as tradeoff
