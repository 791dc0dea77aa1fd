"""Plots of guarantees, runs and noise; matplotlib comes with the extra `plot`.

Each function draws on the given `ax`, or on the Axes of a new figure, and returns the
Axes. No function shows or saves a figure. An accountant computes every point of a
curve. Lines differ in strokes and markers, so that every plot is readable without
colour.

1. `tradeoff` draws the best trade-off of error rates that any attack can achieve.
   `attack` draws the error rates that one attack achieved.
2. `epsilon_by_step` draws the privacy cost of a run that stops early. `compare` draws
   several plans. `comparison` draws the noise of the mechanisms among which
   `dpjax.plan` chose. `budget` draws the cost of each mechanism to a budget.
3. `noise` draws the standard deviation of noise by step, and `spectrum` draws the power
   of noise by frequency.

`style` gives your own figures the look of these plots: `plt.style.use(plot.style)`.
"""

from dpjax.plot._runs import budget as budget
from dpjax.plot._runs import compare as compare
from dpjax.plot._runs import comparison as comparison
from dpjax.plot._runs import epsilon_by_step as epsilon_by_step
from dpjax.plot._runs import noise as noise
from dpjax.plot._runs import spectrum as spectrum
from dpjax.plot._style import style as style
from dpjax.plot._tradeoff import attack as attack
from dpjax.plot._tradeoff import tradeoff as tradeoff
