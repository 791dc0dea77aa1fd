"""Privacy accountants: pure, jitted, vmappable and differentiable functions."""

from dpjax.accounting import gdp as gdp
