"""`reconcile`, in a process that dies by SIGKILL at a chosen moment of a rollout: what `kill -9` and a power cut do.

Run as a program by `live_controller.Controller.killed`. `--step=ready` dies before the first effect of that step; `--after=3` dies
right after the third effect that acts on the host. `--lease` shortens the lease and the host's grace after it, so that a test of
the host's own way back need not wait for two minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from reconciler.cli import main
from reconciler.core import rollout, steps
from reconciler.core.attempt import Attempt
from reconciler.core.effect import Claim, Effect, GiveBack, Reply
from reconciler.effects.perform import Performer

ACTING = (*rollout.MUTATIONS, Claim, GiveBack)


def arm(step: str | None, after: int | None) -> None:
    """Wrap `Performer.perform`, so that the process ends where it is told to."""
    perform = Performer.perform
    acted = 0

    def deadly(self: Performer, state: Attempt, effect: Effect) -> Reply:
        nonlocal acted
        if state.phase.value == step:
            die()
        reply = perform(self, state, effect)
        acted += isinstance(effect, ACTING)
        if acted == after:
            die()
        return reply

    Performer.perform = deadly  # type: ignore[method-assign]


def die() -> None:
    """End this process as nothing can prevent."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def shorten(lease_s: float) -> None:
    """Let the host act by itself `lease_s` and a third of it after the last renewal."""
    for module in (steps, rollout):
        module.LEASE_TTL_S = lease_s  # type: ignore[misc]
    steps.REVERT_GRACE_S = lease_s / 3  # type: ignore[misc]
    rollout.MARGIN_S = lease_s / 20  # type: ignore[misc]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step")
    parser.add_argument("--after", type=int)
    parser.add_argument("--lease", type=float)
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    arm(asked.step, asked.after)
    if asked.lease is not None:
        shorten(asked.lease)
    sys.argv = ["reconcile", *asked.words]
    main.main()
