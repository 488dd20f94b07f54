"""Distributions fitted to the gaps between failures, their goodness of fit, and the failure rate over age.

All times are in hours. Reference: Maeng et al., CPR, MLSys 2021, arXiv 2011.02999, which fits a gamma distribution to
the time to failure of jobs.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import digamma, gammainc, polygamma


class Fit(NamedTuple):
    """A distribution fitted to gaps by maximum likelihood, with its goodness of fit."""

    shape: float  # 1 for the exponential distribution
    scale_hours: float
    log_likelihood: float
    ks_distance: float  # Kolmogorov-Smirnov: largest distance between the two cumulative distributions
    ks_limit: float  # critical value of ks_distance at 5 %; lenient, as the fit used the same gaps
    survival_rmse: float  # between empirical and fitted survival function, at the gaps

    @property
    def mean_hours(self) -> float:
        """Mean of the distribution, in hours."""
        return self.shape * self.scale_hours


def hazard_by_age(gaps: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Failures per hour as a function of the time since the last failure; constant for the exponential distribution.

    hazard of ages a to b = number of gaps that end there / total hours that all gaps spend there

    Args:
      gaps: f64[n], hours.
      edges: f64[k + 1], hours, ascending; bin i holds ages in [edges[i], edges[i + 1]).

    Returns:
      f64[k] failures per hour, NaN where no gap is that long; f64[k] hours spent in each bin.
    """
    spent = (np.clip(gaps[:, None], edges[None, :-1], edges[None, 1:]) - edges[None, :-1]).sum(axis=0)
    place = np.searchsorted(edges, gaps, side="right") - 1
    ended = np.bincount(place[(place >= 0) & (place < len(spent))], minlength=len(spent))
    return np.divide(ended, spent, out=np.full(len(spent), np.nan), where=spent > 0), spent


def fit_exponential(gaps: np.ndarray) -> Fit:
    """Fit the exponential distribution by maximum likelihood: its mean is the mean gap.

    Args:
      gaps: f64[n], hours, above 0.

    Returns:
      Fit of shape 1.

    Raises:
      ValueError: fewer than two gaps; a gap that is not above 0.
    """
    return _fit(_checked(gaps), 1.0)


def fit_gamma(gaps: np.ndarray) -> Fit:
    """Fit the gamma distribution, which arXiv 2011.02999 uses for the time to failure, by maximum likelihood.

    The shape k solves log k - digamma(k) = log(mean gap) - mean(log gap), by Newton's method; scale = mean / k.

    Args:
      gaps: f64[n], hours, above 0, not all equal.

    Returns:
      Fit.

    Raises:
      ValueError: fewer than two gaps; a gap that is not above 0; all gaps equal.
    """
    gaps = _checked(gaps)
    spread = math.log(gaps.mean()) - float(np.log(gaps).mean())
    if not spread > 1e-12:
        raise ValueError(f"all {len(gaps)} gaps are {gaps[0]} hours: a gamma law needs gaps that differ.")
    # Minka's starting value.
    shape = (3 - spread + math.sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    for _ in range(20):
        step = (math.log(shape) - digamma(shape) - spread) / (1 / shape - polygamma(1, shape))
        shape = max(shape / 2, shape - step)
        if abs(step) < 1e-12 * shape:
            break
    return _fit(gaps, float(shape))


def _fit(gaps, shape):
    scale = float(gaps.mean()) / shape
    ordered, n = np.sort(gaps) / scale, len(gaps)
    cdf, step = gammainc(shape, ordered), np.arange(n + 1) / n
    log_likelihood = (shape - 1) * np.log(ordered).sum() - ordered.sum() - n * (math.lgamma(shape) + math.log(scale))
    distance = max((step[1:] - cdf).max(), (cdf - step[:-1]).max())
    rmse = math.sqrt(np.square((step[1:] + step[:-1]) / 2 - cdf).mean())
    return Fit(shape, scale, float(log_likelihood), float(distance), 1.358 / math.sqrt(n), rmse)


def _checked(gaps):
    gaps = np.asarray(gaps, np.float64)
    if gaps.ndim != 1 or len(gaps) < 2 or not ((gaps > 0) & np.isfinite(gaps)).all():
        raise ValueError(
            f"{gaps.size} gaps, the smallest {gaps.min() if gaps.size else None}: need at least two, all above 0 and "
            "finite; merge failures of the same time with `interruptions` first."
        )
    return gaps
