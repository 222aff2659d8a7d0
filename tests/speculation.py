"""A server that speculates as one was measured to, played in virtual time: its streams are real bytes, read by the real reader.

The measured one was vLLM 0.32 on a CPU with n-gram drafts (128 tokens, one stream): at temperature 0 with the end of sequence
ignored the text falls into a loop after a few tokens, and every draft is accepted; of sampled text none is. A pass that drafts
takes 1.7 times as long as one that does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reconciler.bench.load_plan import Endpoint, LoadPlan
from reconciler.bench.summary import Collected, Record, summarise
from reconciler.core.measurement import RunResult

ENDPOINT = Endpoint("127.0.0.1", 1, "completions", "m", engine="vllm")
LOOPS_AFTER = 5
PASS_S = {1: 1 / 139, 4: 4 / 564}
"""Without drafts, by streams."""


def pass_s(drafts: int, streams: int) -> float:
    """Give the time of one pass over all streams."""
    plain = PASS_S[streams]
    return plain * (1.67 + 0.014 * drafts) if drafts else plain


@dataclass
class Speculating:
    """A `bench.meter.Meter` on this server with so many drafts a pass."""

    drafts: int
    sleep: Callable[[float], None]
    accepts: Callable[[bool, int], bool] = lambda greedy, made: greedy and made >= LOOPS_AFTER
    now: float = 0.0
    counted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    )

    def measure(self, plan: LoadPlan, endpoint: Endpoint, on_progress: object) -> RunResult:
        """Play a round and give what the client's own reading makes of it."""
        del endpoint, on_progress
        began, before = self.now, self._counters()
        free = [began] * plan.concurrency
        records = []
        for number in range(plan.requests):
            slot = number % plan.concurrency
            record = self._answer(plan, number, slot, free[slot])
            records.append(record)
            free[slot] = record.end
        self.now = max(free)
        self.sleep(self.now - began)
        after = self._counters()
        collected = Collected(
            tuple(records), began, self.now, counters_before=before, counters_after=after
        )
        return summarise(plan, ENDPOINT, collected)

    def flush(self, endpoint: Endpoint) -> bool:
        """Have no prefix cache."""
        del endpoint
        return False

    def ask(self, plan: LoadPlan, endpoint: Endpoint, on_progress: object) -> Any:
        """Answer no questions."""
        return self.measure(plan, endpoint, on_progress), {}

    def _answer(self, plan: LoadPlan, number: int, slot: int, at: float) -> Record:
        greedy = plan.sampling.temperature == 0
        # Rounds of one server are never equal: a thousandth more or less.
        took = pass_s(self.drafts, plan.concurrency) * (1 + (number + plan.round) % 3 * 0.001)
        pieces, made, now = [], 0, at
        while made < plan.max_tokens:
            now += took
            held = self._pass(plan.max_tokens - made, drafted=self.accepts(greedy, made))
            words = "".join(f" {number}w{made + n}" for n in range(held))
            made += held
            finish = "length" if made == plan.max_tokens else None
            pieces.append((now, _event(words, finish)))
        usage = {"prompt_tokens": 9, "completion_tokens": made}
        pieces.append((now, _data({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"))
        return Record(number, slot, at, at, now, 200, pieces=tuple(pieces))

    def _pass(self, left: int, *, drafted: bool) -> int:
        """Give the tokens of one pass, and count its drafts."""
        accepted = min(self.drafts, left - 1) if drafted else 0
        if self.drafts:
            self.counted["drafts"] += 1
            self.counted["draft_tokens"] += self.drafts
            self.counted["accepted_tokens"] += accepted
        return 1 + accepted

    def _counters(self) -> str:
        return "".join(
            f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}\n'
            for name, value in self.counted.items()
        )


def _event(text: str, finish: str | None) -> bytes:
    return _data({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def _data(body: Any) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()
