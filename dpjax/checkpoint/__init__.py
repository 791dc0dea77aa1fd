"""Checkpoints of a private run: a resumed run has the guarantee of a single run.

**Idea.** The same key gives the same noise. You can therefore resume an interrupted run
exactly. For the same reason, resuming a run with other data, another plan or other
random draws breaks the guarantee: the same noise then hides two different sums, and
their difference has no noise. A checkpoint therefore contains all arrays and numbers
that a run needs to continue bit for bit. A checkpoint also contains the plan, the name
of the data set and a description of the random draws. `restore` refuses a checkpoint if
one of these three differs.

A `Run` has the key, the step, the parameters, the optimizer's state and a digest of the
parameters that were released last. The modules are:

1. `_record`: the record of a run. The record has the plan's attributes (except
   `epsilon`, `solved_for` and `comparison`), the names, dtypes and shapes of the run's
   arrays, and a digest of the arrays. The record also has a digest of the batches and
   noise that a fixed key, which is not secret, gives under that plan in this
   environment. `save` writes the record beside the arrays. `restore` compares the
   record with the caller's plan and run, and only then restores the arrays.
2. `_processes`: actions of several processes that succeed in all of them or in none.
3. `_disk`: files that are written atomically, and survive a loss of power. Orbax (the
   extra `checkpoint`) saves arrays shard by shard, and restores them with the sharding
   that the caller requests.
4. `_folder`: `save`, `restore` and `resume`. A checkpoint has a temporary name until it
   is complete.

A checkpoint is as secret as the data. `dpjax.ledger` accounts for the releases of runs.
"""

from dpjax.checkpoint._folder import plan_of as plan_of
from dpjax.checkpoint._folder import restore as restore
from dpjax.checkpoint._folder import resume as resume
from dpjax.checkpoint._folder import save as save
from dpjax.checkpoint._folder import steps as steps
from dpjax.checkpoint._record import Run as Run
from dpjax.checkpoint._record import digest as digest
