"""What an engine says about itself leaves the host without secrets."""

from __future__ import annotations

import json

import pytest

from reconciler.helper.redaction import MASK, redacted, redacted_body, redacted_text

KEY = "k3y-in-clear-0001"


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": KEY},
        {"admin_api_key": KEY, "inner": [{"hf_token": KEY}]},
        {"api-key": [KEY]},
        {"launch_command": ["python", "-m", "sglang.launch_server", "--api-key", KEY, "--port", "1"]},
        {"launch_command": [f"--admin-api-key={KEY}"]},
        {"launch_command": f"sglang serve --api-key {KEY} --port 1"},
        {"proxy": f"http://user:{KEY}@proxy:3128/"},
        {"text": f"ServerArgs(model_path='m', api_key='{KEY}', port=1)"},
        {"text": f"non-default args: {{'api_key': ['{KEY}'], 'port': 1}}"},
        {"text": f"Authorization: Bearer {KEY}"},
        {"ssl_keyfile_password": KEY},
    ],
)  # fmt: skip
def test_a_secret_is_masked_wherever_an_engine_puts_it(value: dict[str, object]) -> None:
    """S17: under a key that names one, behind a flag, in a URL, in a printed object."""
    shown = json.dumps(redacted(value))
    assert KEY not in shown
    assert MASK in shown


def test_a_known_secret_is_masked_under_any_name() -> None:
    """The key that the helper sent itself is looked for everywhere."""
    assert KEY not in redacted_body(json.dumps({"note": f"x{KEY}y"}).encode(), [KEY]).decode()


def test_what_is_no_secret_stays() -> None:
    """Numbers of tokens, tokenizers and log lines are what the comparison and people read."""
    plain = {
        "max_total_tokens": 123, "speculative_num_draft_tokens": 4, "tokenizer_path": "/srv/m", "api_key": None,
        "stop_token_ids": [1, 2], "launch_command": ["--max-total-tokens", "5"],
    }  # fmt: skip
    assert redacted(plain) == plain
    for line in (
        "Decode batch, #running-req: 1, #token: 3073, token usage: 0.05, gen throughput (token/s): 234.12",
        "max_total_num_tokens=1000, chunked_prefill_size=8192",
        "Loading tokenizer from /srv/models/qwen",
    ):
        assert redacted_text(line) == line


def test_what_is_no_json_is_left_out_and_depth_is_bounded() -> None:
    """A body that cannot be searched is not passed on; a thousand levels do not end the helper."""
    assert redacted_body(b"api_key: x") == b""
    assert redacted_body(b"[" * 100_000) == b""
    deep: object = {"api_key": KEY}
    for _ in range(200):
        deep = [deep]
    assert KEY not in json.dumps(redacted(deep))
