"""Plots of guarantees, runs and noise.

The plots need matplotlib, which the extra `plot` of the package dpjax installs. Each
function draws on the given `ax`, or on the Axes of a new figure, and returns the Axes.
No function shows or saves a figure. Accountants compute all values of ε and all
trade-off curves. Lines differ in strokes and markers, so that every plot is readable
without colour.

1. `tradeoff` draws the error rates that guarantees allow an attack to achieve.
   `attack` also draws the error rates that one attack achieved.
2. `epsilon_by_step` draws the privacy cost of runs that stop early. `compare` draws
   noise, ε and signal-to-noise ratio of several plans. `comparison` draws the noise of
   the mechanisms among which `dpjax.plan` chose. `budget` draws the share of a budget
   that each mechanism has used.
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
