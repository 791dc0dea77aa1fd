"""All parts of a private run, made from one object so that their numbers agree.

**Idea.** The guarantee of a private run depends on numbers that several parts share:
the sampling rate, the clip norm, the standard deviation of the noise, the batch size by
which the optimizer divides a sum, and the number of steps. A `Plan` holds each number
once, and makes the sampler, the gradient, the optimizer and the guarantee.

**Files**, in the order in which a run uses them:

1. `parameters` defines a frozen record of all numbers of a run, which the other files
   read. Some of these numbers may vary from step to step by a schedule. The clip norm
   may also follow a quantile of the gradient norms.
2. `mechanisms` draws examples, and describes the run to privacy accountants.
3. `solve` has the function `dpjax.plan`, which computes the number that the caller
   leaves out (noise, steps, batch size or ε), and the maximum number of examples in a
   batch of random size. `comparison` chooses how examples are drawn and how the noise
   is correlated, if the caller allows several ways.
4. `loader` reads the examples of a batch from arrays, files and data sets on the host.
   `users` groups examples if one person has several examples.
5. `loss` transforms the caller's loss into a sum of clipped gradients. `modules` splits
   a model into trained parameters and other leaves. `zero_gradients` finds parameters
   that the loss does not train.
6. `optimizer` adds the noise, divides by the batch size, calls the user's optimizer and
   enforces the step limit. It also adds up the gradients of the parts of a batch.
7. `guarantee` states the guarantee as a sentence for a paper and as JSON, with the
   papers to cite.
8. `plan` has the class `Plan`, whose methods call the files above.
9. `recipe` chooses, without a search, the numbers of a run for a linear model. `tuning`
   searches over the settings of a run, and releases the best run.
"""
