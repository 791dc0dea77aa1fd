"""Differentially private training in JAX."""

from dpjax import accounting as accounting
from dpjax.adjacency import Adjacency as Adjacency
