"""The little statistics that a gate needs: binomial tails and Student's t, exact enough and without a library. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal


def binomial_at_most(count: int, draws: int, share: float) -> float:
    """Give the probability of at most `count` hits in `draws` when each is one with chance `share`."""
    if count < 0:
        return 0.0
    if count >= draws or share <= 0:
        return 1.0
    if share >= 1:
        return 0.0
    log_hit, log_miss = math.log(share), math.log1p(-share)
    whole = math.lgamma(draws + 1)
    terms = (
        math.exp(
            whole
            - math.lgamma(k + 1)
            - math.lgamma(draws - k + 1)
            + k * log_hit
            + (draws - k) * log_miss
        )
        for k in range(count + 1)
    )
    return min(1.0, math.fsum(terms))


@lru_cache(maxsize=1024)
def student_t(level: float, freedom: int) -> float:
    """Give the one-sided quantile of Student's t (level above one half), by bisection of its integral."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        tail = 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + middle * middle))
        low, high = (middle, high) if 1 - tail < level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Give the regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny = 1e-300
    c, d = 1.0, 1 / max(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 300):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return front * fraction / a


def mean_of(values: Iterable[float]) -> float:
    """Give the mean; there must be a value."""
    listed = list(values)
    return math.fsum(listed) / len(listed)


def variance(values: Sequence[float]) -> float:
    """Give the variance of a sample; 0 for a single value, which shows no spread."""
    if len(values) < 2:
        return 0.0
    mean = mean_of(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)


def requests_needed(bound: Literal["min", "max"], percentile: float) -> int:
    """Give how many requests decide a percentile with 95 % confidence: 16 for p82.9, 299 for p99.

    With every one of n requests inside the limit, the chance of that under a server that breaks it is
    p^n (for a `max`; (1-p)^n for a `min`), and must be at most 5 %.
    """
    share = percentile / 100 if bound == "max" else 1 - percentile / 100
    return math.ceil(round(math.log(0.05) / math.log(share), 6))
