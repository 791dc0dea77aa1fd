"""Privacy accountants: pure, jitted, vmappable and differentiable functions."""

from dpjax.accounting import calibrate as calibrate
from dpjax.accounting import fdp as fdp
from dpjax.accounting import gdp as gdp
from dpjax.accounting import iteration as iteration
from dpjax.accounting import pld as pld
from dpjax.accounting import pure as pure
from dpjax.accounting import random_rounds as random_rounds
from dpjax.accounting import rdp as rdp
from dpjax.accounting import tree as tree
from dpjax.accounting import truncation as truncation
