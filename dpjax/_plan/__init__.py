"""Make all parts of a private run from one object, so that their numbers agree.

**Idea.** The guarantee of a private run depends on numbers that several parts share:
the sampler's rate, the clip norm of the gradient, the optimizer's noise and divisor,
and the number of steps. A `Plan` holds each number once. It makes the sampler, the
gradient, the optimizer and the guarantee from its numbers.

**Files**, in the order in which a run uses them:

1. `parameters`: all numbers of a run, in one frozen record that the other files read,
   with the numbers that vary from step to step.
2. `mechanisms`: how examples are drawn, and the matching privacy event for accountants.
3. `capacity`: the ε of a run, and the capacity of batches of random size. `solve`:
   `dpjax.plan`, which computes the number that the caller leaves out: noise, steps,
   batch size or ε. `comparison`: the choice of a mechanism where the caller names none,
   and of the strategy that correlates the noise.
4. `loader`: the examples of a batch from arrays, files and data sets on the host.
   `users`: data in which one person has several examples.
5. `loss`: the caller's loss, transformed into clipped sums. `modules`: models that hold
   more than parameters. `zero_gradients`: which parameters the loss does not train, for
   warnings.
6. `optimizer`: the noise, the mean, the user's optimizer, the step limit, and the
   accumulation of gradients over the parts of a batch.
   `quantile`: a clip norm that follows a released quantile.
7. `guarantee`: the guarantee, as a sentence for a paper and as a record for a machine,
   with the papers to cite.
8. `plan`: the class `Plan`, whose methods call the files above.
9. `recipe`: the numbers of a run for a linear model, chosen without a search. `tuning`:
   a search over the settings of a run, which releases the best run.
"""
