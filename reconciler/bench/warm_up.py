"""Warming up: unmeasured requests at a run's concurrency until two rounds are alike.

Kernels compile and graphs are captured on the first requests of a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress
from reconciler.bench.meter import Meter

WARM_TOKENS = 32
_WARM_ROUNDS = 5
_WARM_ENOUGH = 0.05


def warm_up(
    plan: LoadPlan,
    endpoint: Endpoint,
    meter: Meter,
    on_progress: Callable[[Progress], None] | None,
    *,
    left: Callable[[], float],
) -> None:
    """Send `plan` again and again, at most five times, until its speed settles or `left` says that time is over."""
    before: float | None = None
    for number in range(_WARM_ROUNDS):
        if left() <= 0:
            return
        warm = replace(plan, salt=f"{plan.salt}w{number}", deadline_s=left())
        result = meter.measure(warm, endpoint, on_progress)
        speed = result.decode_tps.p50
        if speed is None or result.infrastructure is not None:
            return
        if before is not None and abs(speed / before - 1) < _WARM_ENOUGH:
            return
        before = speed
