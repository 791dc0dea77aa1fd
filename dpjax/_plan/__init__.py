"""One value from which a private run is made, so that its parts cannot disagree.

**Idea.** The guarantee of a private run rests on numbers that several parts share: the
sampler's rate, the clip norm of the gradient, the noise and the divisor of the
optimizer, the number of steps. A `Plan` holds each of them once. Whoever asks for a
sampler, a gradient, an optimizer or a guarantee gets one that was made from it.

**In the order of the data**, a file each:

1. `parameters`: all numbers of a run, in one frozen record that the other files read.
2. `mechanisms`: how examples are drawn, and which event that is for accountants.
   `shape` for noise that is correlated between steps; `schedule` for numbers that vary
   from step to step.
3. `solve`: `dpjax.plan`, from what is given to what is not: noise, steps, batch size or
   ε; `capacity` for the size of a padded batch; `comparison` where mechanisms are left
   to choose.
4. `loader`: the examples of a batch from arrays, files and data sets on the host;
   `users` for data in which a person has several.
5. `loss`: a script's own loss, turned into clipped sums; `modules` for models that are
   not trees of parameters alone; `accumulation` for batches taken in parts.
6. `optimizer`: noise, mean, the user's optimizer, and the refusal of further steps;
   `quantile` for a clip norm that follows what was released.
7. `guarantee`: what was promised, as a sentence for a paper and a record for a machine.
8. `plan`: the `Plan`, whose methods are these steps.
"""

from dpjax._plan.accumulation import accumulate as accumulate
from dpjax._plan.comparison import Candidate as Candidate
from dpjax._plan.comparison import Comparison as Comparison
from dpjax._plan.guarantee import RunGuarantee as RunGuarantee
from dpjax._plan.loader import Examples as Examples
from dpjax._plan.plan import Plan as Plan
from dpjax._plan.quantile import Bounded as Bounded
from dpjax._plan.quantile import QuantileClip as QuantileClip
from dpjax._plan.users import OfUser as OfUser
from dpjax._plan.users import Users as Users
from dpjax._plan.users import by_user as by_user
