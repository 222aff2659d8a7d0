"""Who carries out a round: this process, or the same client on the server's own host.

A meter measures one round, asks one round of questions and gives the texts too, or empties the prefix cache. `effects/host_meter.py` has
the one that works on a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from reconciler.bench import load
from reconciler.bench.ask import flush_prefix_cache
from reconciler.bench.load_plan import Endpoint, LoadPlan, Progress
from reconciler.bench.summary import answers
from reconciler.core.measurement import RunResult

OnProgress = Callable[[Progress], None] | None


class Meter(Protocol):
    """Measures rounds. Neither method raises for what the server or its network does."""

    def measure(self, plan: LoadPlan, endpoint: Endpoint, on_progress: OnProgress) -> RunResult:
        """Run one round."""
        ...

    def ask(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: OnProgress
    ) -> tuple[RunResult, Mapping[int, str]]:
        """Run one round and give the text of each answer that succeeded, by the number of its request."""
        ...

    def flush(self, endpoint: Endpoint) -> bool:
        """Empty the server's prefix cache where its engine can; False where nothing says that it was."""
        ...


class LocalMeter:
    """The client in this process."""

    def measure(self, plan: LoadPlan, endpoint: Endpoint, on_progress: OnProgress) -> RunResult:
        """Run one round."""
        return load.measure(plan, endpoint, on_progress=on_progress)

    def ask(
        self, plan: LoadPlan, endpoint: Endpoint, on_progress: OnProgress
    ) -> tuple[RunResult, Mapping[int, str]]:
        """Run one round and give the texts."""
        return answers(plan, endpoint, load.collect(plan, endpoint, on_progress=on_progress))

    def flush(self, endpoint: Endpoint) -> bool:
        """Empty the prefix cache."""
        return flush_prefix_cache(endpoint)


LOCAL = LocalMeter()
