"""The gate's own doors: what fakes acceptance is refused, what the operator does not have is said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reconciler import wiring
from reconciler.core.errors import UsageError
from reconciler.core.live import Known, Unknown
from reconciler.core.measurement import ReasonCode
from reconciler.core.spec import Gate, Server
from reconciler.effects import gate
from reconciler.effects.bench import endpoint_at, on_the_host

RUN = {"name": "one", "concurrency": 1, "requests": 3, "max_tokens": 4}


def _server(**changes: Any) -> Server:
    fields: dict[str, Any] = {
        "name": "s", "host": "h", "gpus": [0], "engine": "sglang", "runtime": {"python": "/opt/x/bin/python"},
        "model": "/m", "listen": {"port": 30000, "address": "0.0.0.0"},
        "speculative": {"algorithm": "NEXTN", "num_steps": 3}, "gate": {"runs": [RUN]},
    }  # fmt: skip
    return Server.model_validate(fields | changes, context={"engines": wiring.engines()})


class _Found:
    """A look at a host, as far as this gate reads it."""

    def __init__(self, environment: object, argv: object) -> None:
        self.servers = {"s": self}
        self.environment, self.argv = environment, argv


@pytest.mark.parametrize(
    ("environment", "argv", "found"),
    [
        (("PATH=/bin", "SGLANG_SIMULATE_ACC_LEN=4"), (), "SGLANG_SIMULATE_ACC_LEN=4"),
        (("SIMULATE_ACC_LEN=4",), (), "SIMULATE_ACC_LEN=4"),
        ((), ("vllm", '{"rejection_sample_method": "synthetic"}'), '{"rejection_sample_method": "synthetic"}'),
        ((), ("vllm", "--speculative-config.rejection_sample_method=synthetic"), "--speculative-config.rejection_sample_method=synthetic"),
        (("LLAMA_ARG_SPEC_SYNTH_LEN=3.4",), (), "LLAMA_ARG_SPEC_SYNTH_LEN=3.4"),
        ((), ("llama-server", "--spec-synth-rates", "0.8"), "--spec-synth-rates"),
        (("PATH=/bin",), ("python", "-m", "sglang.launch_server"), ""),
        (None, None, ""),
    ],
)  # fmt: skip
def test_a_live_server_that_fakes_its_acceptance_is_seen(
    monkeypatch: pytest.MonkeyPatch, environment: Any, argv: Any, found: str
) -> None:
    """Whatever the spec says, the variable in the unit's or its manager's environment counts, and the command line."""
    parts = [Unknown("?") if p is None else Known(p) for p in (environment, argv)]
    monkeypatch.setattr(gate, "observe", lambda *_, **__: _Found(*parts))
    assert gate.faked_acceptance(_server(), None) == found  # type: ignore[arg-type]
    assert gate.faked_acceptance(_server(speculative=None), None) == ""  # type: ignore[arg-type]


def test_a_faked_acceptance_is_a_fail_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate refuses with its own reason; no tunnel is opened and no request sent."""
    parts = (Known(("SGLANG_SIMULATE_ACC_LEN=4",)), Known(()))
    monkeypatch.setattr(gate, "observe", lambda *_, **__: _Found(*parts))
    server = _server()
    assert server.gate is not None
    outcome = gate.outcome_of(
        server, server.gate, None, None, deadline_s=1, on_progress=lambda _line: None  # type: ignore[arg-type]
    )  # fmt: skip
    assert (outcome.verdict.kind.value, outcome.results) == ("fail", ())
    assert outcome.verdict.reasons[0].code is ReasonCode.FAKED


@pytest.mark.parametrize(
    ("fields", "workloads", "said"),
    [
        ({"prompts": "chats"}, None, "needs the setting `workloads`"),
        ({"prompts": "chats"}, Path("/no/such"), "is no file"),
        ({"runs": [RUN | {"runner": "x"}]}, None, "there is no runner 'x'"),
    ],
)
def test_what_the_operator_does_not_have_is_said(
    fields: Mapping[str, Any], workloads: Path | None, said: str
) -> None:
    """A spec names prompts and runners; what there is, the operator says."""
    server = _server(speculative=None)
    asked = Gate.model_validate({"runs": [RUN], **fields})
    with pytest.raises(UsageError, match=said):
        gate.outcome_of(
            server, asked, None, None, deadline_s=1, on_progress=lambda _line: None, workloads=workloads  # type: ignore[arg-type]
        )  # fmt: skip


def test_a_spec_cannot_reach_outside_the_folder_of_prompts() -> None:
    """`prompts` is a name and no path (S19)."""
    with pytest.raises(ValueError, match="prompts"):
        Gate.model_validate({"runs": [RUN], "prompts": "../secrets"})


@pytest.mark.parametrize(
    "fields",
    [
        {"workload": "greedy", "runs": [RUN]},
        {"runs": [RUN | {"workload": "greedy"}]},
        {"runs": [RUN, RUN | {"name": "g", "workload": "greedy", "min_accept_length": 2}]},
    ],
)
def test_greedy_never_decides_alone(fields: Mapping[str, Any]) -> None:
    """A gate of greedy runs alone, and an acceptance limit on one, are refused when the spec is read."""
    with pytest.raises(ValueError, match="greedy"):
        Gate.model_validate(fields)


def test_where_the_client_runs_survives_the_record() -> None:
    """`from` is written as it is read."""
    asked = Gate.model_validate({"runs": [RUN], "from": "host"})
    assert asked.measured_from == "host"
    stored = asked.model_dump(mode="json", exclude_defaults=True)
    assert stored["from"] == "host"
    assert Gate.model_validate(stored) == asked
    assert on_the_host(_server(), bearer=None).host == "127.0.0.1"


def test_a_url_says_all_of_the_way() -> None:
    """TLS, port, path and a v6 address end up where requests need them."""
    found = endpoint_at("https://[::1]/llm/v1/", api=None, model="m", engine="vllm", bearer=None)
    assert (found.host, found.port, found.tls, found.prefix) == ("::1", 443, True, "/llm")
    assert found.authority == "[::1]:443"
