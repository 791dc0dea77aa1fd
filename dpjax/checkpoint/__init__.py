"""Checkpoints of a private run: a resumed run keeps the guarantee of a single run.

**Idea.** The same key gives the same noise. An interrupted run can therefore be resumed
exactly. For the same reason, resuming a run with other data, another plan or another
order of draws breaks its guarantee: the same noise then hides two different sums, and
their difference has no noise. A checkpoint therefore holds all that a run needs to
continue bit for bit, and a fingerprint of what must not change. Restoring a checkpoint
under another fingerprint is refused.

A `Run` is the key, the step, the parameters and the optimizer's state. The modules, in
the order in which the data passes through them:

1. `_run`: the run's arrays by name, and the digest of their bits.
2. `_fingerprint`: the plan's numbers, and what a public key draws under that plan in
   this environment.
3. `_record`: the record of the run and its fingerprint, which is written beside the
   arrays and compared before anything is restored.
4. `_durable`: atomic writes of files, which survive a loss of power. `_arrays`: saving
   arrays with orbax (the extra `checkpoint`), shard by shard, and restoring them with
   the sharding that the caller requests.
5. `_processes`: actions of several processes that succeed in all of them or in none.
6. `_folder`: save, restore and resume. A checkpoint is written under a temporary name
   and renamed once it is complete.

A checkpoint is as secret as the data. `dpjax.ledger` accounts for what runs have
released.
"""

from dpjax.checkpoint._folder import plan_of as plan_of
from dpjax.checkpoint._folder import restore as restore
from dpjax.checkpoint._folder import resume as resume
from dpjax.checkpoint._folder import save as save
from dpjax.checkpoint._folder import steps as steps
from dpjax.checkpoint._record import Run as Run
from dpjax.checkpoint._record import digest as digest
