"""Book-keeping."""

from dpjax.bookkeeping.engine import keep_books as keep_books
from dpjax.bookkeeping.engine import squares_and_sum as squares_and_sum
from dpjax.bookkeeping.plan import Plan as Plan
from dpjax.bookkeeping.plan import plan as plan
from dpjax.bookkeeping.trace import Trace as Trace
from dpjax.bookkeeping.trace import trace as trace
