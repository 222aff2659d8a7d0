"""The one secret that a gate needs: which files may be read for it."""

from __future__ import annotations

import pytest

from reconciler.lab.simulated import SimulatedHost, World, add_host


@pytest.fixture
def host() -> SimulatedHost:
    """Give an enrolled host with a key in the operator's place and one of root's elsewhere."""
    host = add_host(World(1), "one", gpus=1)
    host.host.files.put("/etc/reconciler/qwen.key", b"sesame\n")
    host.host.files.put("/etc/shadow", b"root:*:\n")
    return host


def ask(host: SimulatedHost, verb: str, args: dict[str, object]) -> dict[str, object]:
    """Send one request."""
    return host.call({"format": 1, "nonce": "0" * 32, "verb": verb, "args": args})


def test_a_key_in_the_operators_place_is_given(host: SimulatedHost) -> None:
    """The gate runs where the controller is, so it gets the key that the spec names."""
    answer = ask(host, "api-key", {"server": "qwen", "path": "/etc/reconciler/qwen.key"})
    assert answer["data"] == {"key": "sesame"}


@pytest.mark.parametrize(
    "path", ["/etc/shadow", "/etc/reconciler/../shadow", "/etc/reconciler/none.key"]
)
def test_no_spec_can_have_another_file_read_as_root(host: SimulatedHost, path: str) -> None:
    """S17, S19: a spec names the path and the helper runs as root, so only secrets' own places count."""
    answer = ask(host, "api-key", {"server": "qwen", "path": path})
    assert answer["outcome"] == "refused"
    assert "root:" not in str(answer)
    fetch = {
        "method": "GET", "address": "127.0.0.1", "port": 30000, "path": "/", "headers": {}, "body": None,
        "timeout_s": 1.0, "max_bytes": 1000, "bearer_file": path,
    }  # fmt: skip
    assert ask(host, "fetch", fetch)["outcome"] == "refused"
