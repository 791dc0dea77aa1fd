"""What a private run is resumed from, so that its guarantee stays that of one run.

**Idea.** The same key gives the same noise. That is what lets a run go on where it was
interrupted, and what ruins it where it goes on as another one: with other data, another
plan, or another order of draws, one noise hides two sums, and their difference has
none. So a checkpoint holds what a run needs to go on bit for bit, and the fingerprint
of what must not change; to restore it under another one is refused.

A `Run` is the key, the step, the parameters and the optimizer's state. In the order of
the data, a file each:

1. `_run`: its arrays as a list with names, and the digest of their bits.
2. `_fingerprint`: the plan's numbers, and what a public key draws by it here.
3. `_record`: what is written of both, and compared before anything is restored.
4. `_durable`: files that are whole or not there, also after a loss of power. `_arrays`:
   arrays by orbax (the extra `checkpoint`), each in pieces as it is cut and onto the
   mesh that is asked for.
5. `_processes`: what several processes do as one, in all of them or in none.
6. `_folder`: save, restore, resume. A checkpoint is written under a temporary name and
   renamed once it is whole.

A checkpoint is as secret as the data. `dpjax.ledger` keeps account of what runs have
released.
"""

from dpjax.checkpoint._folder import plan_of as plan_of
from dpjax.checkpoint._folder import restore as restore
from dpjax.checkpoint._folder import resume as resume
from dpjax.checkpoint._folder import save as save
from dpjax.checkpoint._folder import steps as steps
from dpjax.checkpoint._run import Run as Run
from dpjax.checkpoint._run import digest as digest
