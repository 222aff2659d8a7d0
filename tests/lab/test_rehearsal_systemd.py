"""A rehearsal on a host with a real systemd and sshd: the same words, the same ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsals import rehearse

from reconciler.lab.hosts import LabPaths

pytestmark = pytest.mark.lab

SPECS = """apiVersion: reconciler/v1
kind: Host
name: llm-one
ssh: {address: 192.0.2.10, user: deploy}
---
apiVersion: reconciler/v1
kind: Server
name: small
host: llm-one
gpus: [1]
engine: {name: sglang, version: 0.5.23}
runtime: {python: /opt/sglang/bin/python, user: sglang}
model: org/small
served_model_name: small
listen: {port: 30000, api_key: {file: /etc/reconciler/small.key}}
secrets: {HF_TOKEN: {file: /etc/reconciler/hf-token}}
timeouts: {drain: 5s, stop: 5s, settle: 1s}
gate:
  quality: "off"
  runs:
    - {name: single, concurrency: 1, requests: 6, max_tokens: 32, min_decode_tps: 100}
"""


def test_a_left_over_is_ended_on_a_real_systemd(tmp_path: Path, lab: LabPaths) -> None:
    """Enrolled and reached over ssh as a real host is; a key is asked for; what escaped is ended; the host is gone afterwards."""
    assert lab.directory.name  # the fixture skips where no lab host can run
    specs = tmp_path / "small.yaml"
    specs.write_text(SPECS)
    done = rehearse(
        "-o", "json", str(specs), "--break", "left-over", home=tmp_path, backend="systemd"
    )
    assert done.code == 0, done.errors + done.text[-3000:]
    first, second = done.end["chapters"]
    assert first["outcomes"][0]["outcome"] == "Applied"
    assert second["outcomes"][0]["outcome"] == "Applied"
    assert second["outage_s"] > 0
    assert any("by reconcile" in said for said in second["ended_by_force"])
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
    assert not any(Path("/run/reconciler-rehearsal").glob("*/run/*"))
