"""An append-only account of all releases from one data set.

**Idea.** A release cannot be undone. The total privacy loss is that of all releases
together, including releases that were withdrawn, repeated or made by somebody else. You
therefore record a release before you use it, in an append-only file. Each line contains
the hash of the line before it, so that `read` detects a line that was changed, removed
or moved, within the following limits.

**Limits of the hash chain.** The file alone cannot show that its last lines were cut
off, or that the whole file was rewritten. Store `Ledger.head` elsewhere, and pass it to
`read`, which raises an error unless the line with that hash is still in the file. The
chain cannot show releases that were never recorded.

**One noise, one release.** The name of a run is derived from the run's key. A run that
was killed may repeat its last steps, and then release parameters again at the same
step. If these parameters are the same as before, the ledger counts one release. If the
parameters differ, the same noise has hidden two different sums, whose difference has no
noise. The ledger then refuses to record the second release, or with `repeated=True`
counts an infinite ε.

If a program has several processes, every process must call the functions that write.
Only the first process writes, and the other processes receive the result.

The modules, in the order in which the data passes through them:

1. `_chain`: lines of JSON with their hashes, and the atomic appending of a line.
2. `_entries`: the typed records in the lines, which describe mechanisms by events; the
   total ε of all releases, which holds if all plans were fixed before any output was
   seen; and the functions that check and record a new entry.
3. `_budget`: a privacy budget (ε, δ) for plans, statistics and other mechanisms.
   Outputs of earlier mechanisms may determine the next mechanism.
"""

from dpjax.ledger._budget import Budget as Budget
from dpjax.ledger._budget import Draw as Draw
from dpjax.ledger._entries import End as End
from dpjax.ledger._entries import Ledger as Ledger
from dpjax.ledger._entries import Other as Other
from dpjax.ledger._entries import Release as Release
from dpjax.ledger._entries import end as end
from dpjax.ledger._entries import other as other
from dpjax.ledger._entries import read as read
from dpjax.ledger._entries import release as release
from dpjax.ledger._entries import run_name as run_name
