"""Define regularised regression on one data set: the objective and its minimum."""

import functools

import _erm_data
import jax.numpy as jnp
import numpy as np

from dpjax import Adjacency
from dpjax.solvers import losses

DELTA = 1e-3


class Problem:
    """A data set with a regulariser, its objective, its minimum, and δ."""

    delta = DELTA

    def __init__(self, data_set, mu, folder):
        self.data_set, self.mu = data_set, mu
        self.data = _erm_data.load(data_set, folder)
        self.x, self.y = (a.astype(np.float64) for a in self.data)
        self.n, self.d = self.x.shape
        self.linear = data_set.positive is None
        self.loss = (
            losses.huber(1.0, feature_norm=1.0)
            if self.linear
            else losses.logistic(feature_norm=1.0)
        )
        self.whole_loss = functools.partial(_regularised, self.loss, mu)
        self.setting = {
            **self.loss.setting,
            "regularization": float(mu),
            "diameter": float("inf"),
            "adjacency": Adjacency.REPLACE,
        }
        self.step_size = 1 / (self.loss.smoothness + 2 * mu)
        self.start = jnp.zeros(self.d)
        self.best = self._minimum()
        self.at_start = self.objective(self.start) - self.best

    def _parts(self, w):
        """Return the objective, its derivative by the scores, and its curvature."""
        scores = self.x @ w
        if self.linear:
            r = scores - self.y
            inside = np.abs(r) <= 1
            value = np.where(inside, r * r / 2, np.abs(r) - 0.5)
            return value.mean() + self.mu / 2 * w @ w, np.clip(r, -1, 1), inside * 1.0
        margin = self.y * scores
        p = 1 / (1 + np.exp(np.clip(margin, -500, 500)))
        value = np.logaddexp(0, -margin).mean() + self.mu / 2 * w @ w
        return value, -self.y * p, p * (1 - p)

    def objective(self, w):
        """Return the objective F(w) in float64."""
        return self._parts(np.asarray(w, np.float64))[0]

    def _minimum(self):
        """Minimise the objective by Newton's method with a line search."""
        w = np.zeros(self.d)
        for _ in range(200):
            value, slope, curvature = self._parts(w)
            gradient = self.x.T @ slope / self.n + self.mu * w
            hessian = (self.x.T * curvature) @ self.x / self.n
            hessian += (self.mu + 1e-9) * np.eye(self.d)
            step = np.linalg.solve(hessian, gradient)
            size = 1.0
            while self.objective(w - size * step) > value - 1e-4 * size * (
                gradient @ step
            ):
                size /= 2
                if size < 1e-9:
                    return value
            w = w - size * step
            if gradient @ step < 1e-13:
                return self.objective(w)
        return self.objective(w)


def _regularised(loss, mu, w, example):
    return loss(w, example) + mu / 2 * jnp.sum(jnp.square(w))
