"""A benchmark: several concurrencies, a few rounds each, taking turns, and no verdict.

Levels take turns (1, 16, 64, 1, 16, 64, ...), as a gate's runs do, so that a GPU that grows hot slows all alike.
Nothing of the server is changed: no cache is emptied, no lease taken. `core/benchmark.py` holds what comes out.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress
from reconciler.bench.meter import LOCAL, Meter
from reconciler.bench.warm_up import WARM_TOKENS, warm_up
from reconciler.bench.workloads import Workload, warm_up_set
from reconciler.core.measurement import ReasonCode, RunResult

# Fewer say nothing about the spread between rounds.
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Ladder:
    """What to measure. `requests` and `duration_s` are those of one level over all its rounds."""

    workload: Workload
    concurrencies: tuple[int, ...] = (1, 16)
    requests: int | None = None
    duration_s: float | None = None
    max_tokens: int = 256
    rounds: int = ROUNDS
    ttft_limit_s: float = 60.0
    idle_limit_s: float = 30.0

    def round_requests(self, concurrency: int) -> int:
        """Give how many requests a round sends at most: two a stream unless told otherwise."""
        if self.requests is None:
            return 100_000 if self.duration_s is not None else max(8, 2 * concurrency)
        return max(concurrency, -(-self.requests // self.rounds))


def climb(
    ladder: Ladder,
    endpoint: Endpoint,
    *,
    meter: Meter = LOCAL,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[RunResult, ...]:
    """Measure every level in turns and give every round's result.

    Where a round could not be measured at all, the rest is left out: it would say the same.
    """
    salt = secrets.token_hex(3)
    results: list[RunResult] = []
    for number in range(1, ladder.rounds + 1):
        for concurrency in ladder.concurrencies:
            plan = _plan(ladder, concurrency, number, salt)
            if number == 1:
                warm = replace(
                    plan,
                    round=0,
                    prompts=warm_up_set(),
                    requests=concurrency,
                    max_tokens=min(ladder.max_tokens, WARM_TOKENS),
                    duration_s=None,
                )
                warm_up(warm, endpoint, meter, on_progress, left=lambda: 600.0)
            result = meter.measure(plan, endpoint, on_progress)
            results.append(result)
            if result.infrastructure not in {None, ReasonCode.DEADLINE}:
                return tuple(results)
    return tuple(results)


def _plan(ladder: Ladder, concurrency: int, number: int, salt: str) -> LoadPlan:
    rounds = ladder.rounds
    return LoadPlan(
        run=f"c{concurrency}",
        round=number,
        prompts=ladder.workload.prompts,
        concurrency=concurrency,
        requests=ladder.round_requests(concurrency),
        max_tokens=ladder.max_tokens,
        workload=ladder.workload.name,
        sampling=ladder.workload.sampling,
        salt=f"{salt}c{concurrency}r{number}.",
        ttft_limit_s=ladder.ttft_limit_s,
        idle_limit_s=ladder.idle_limit_s,
        duration_s=None if ladder.duration_s is None else ladder.duration_s / rounds,
        # A server that fails this often is not worth more of its users' time.
        stop_after_failures=max(10, ladder.round_requests(concurrency) // 10),
    )
