"""An account of all that was released from one data set, which does not forget.

**Idea.** What was released stays released: privacy is lost by all of it together, also
by what was taken back, done twice or done by somebody else. So it is written down
before it is used, in a file that is only ever added to. Each line holds the hash of the
one before, so that none can be changed, taken out or moved unnoticed.

**What a chain cannot show**: that its last lines were cut off, or that somebody wrote
all of it anew. Keep `Ledger.head` elsewhere, and say it when you `read`: what was
there then is still there, or the ledger is refused. Nor can it show what was never
written into it.

**One noise, one release.** A run has the name of its key. The same parameters after the
same steps, as a run has them that was killed and has done its last steps again, are the
same release. Others are not a further release but a broken one: the same noise has
hidden two sums, and their difference has none. That is refused, or counted without
bound.

Of several processes all call what writes; the first writes, and the others hear of it.

In the order of the data, a file each:

1. `_chain`: lines of JSON and their hashes; how a line comes to be there whole.
2. `_release`: what is written down of a run, and what is refused.
3. `_total`: ε of all of it by composition, which holds where all plans were fixed
   before any output was seen.
"""

from dpjax.ledger._release import end as end
from dpjax.ledger._release import other as other
from dpjax.ledger._release import release as release
from dpjax.ledger._release import run_name as run_name
from dpjax.ledger._total import Entry as Entry
from dpjax.ledger._total import Ledger as Ledger
from dpjax.ledger._total import read as read
