"""Whether a webhook's sender knows the secret. A hook says "look now" and nothing else: its body is never even parsed.

GitHub and Gitea sign the body (HMAC-SHA256), GitLab sends the token or, newer, signs id, time and body. Comparison takes the
same time however wrong a value is. What was seen before within the window is answered and does nothing, so that a recorded
hook cannot be played again and again; a hook that names its own time must be recent.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

WINDOW_S: Final = 300.0
REMEMBERED: Final = 4096
MIN_SECRET: Final = 16
"""Characters. A shorter secret can be guessed from one recorded hook."""


class Judgement(Enum):
    """What is to be answered."""

    ACCEPTED = 202
    SEEN = 200
    REFUSED = 403


@dataclass
class Hooks:
    """The judge of hooks, and what it has seen within the window."""

    secret: bytes
    seen: dict[str, float] = field(default_factory=dict)

    def judge(
        self, headers: Mapping[str, str], body: bytes, *, monotonic: float, wall: float
    ) -> Judgement:
        """Judge one hook. `headers` have names in lower case."""
        mark = self._proven(headers, body, wall)
        if mark is None:
            return Judgement.REFUSED
        for old in [m for m, at in self.seen.items() if monotonic - at > WINDOW_S]:
            del self.seen[old]
        if mark in self.seen:
            return Judgement.SEEN
        while len(self.seen) >= REMEMBERED:
            del self.seen[next(iter(self.seen))]
        self.seen[mark] = monotonic
        return Judgement.ACCEPTED

    def _proven(self, headers: Mapping[str, str], body: bytes, wall: float) -> str | None:
        """Give what tells this hook from others, when its sender knows the secret.

        Not the delivery's own number: it is not signed, and could be made up anew for a hook that was recorded.
        """
        signed = hmac.new(self.secret, body, hashlib.sha256).hexdigest()
        if "x-hub-signature-256" in headers:
            good = _same(headers["x-hub-signature-256"], f"sha256={signed}")
        elif "x-gitea-signature" in headers:
            good = _same(headers["x-gitea-signature"], signed)
        elif "webhook-signature" in headers:
            return self._standard(headers, body, wall)
        elif "x-gitlab-token" in headers:
            good = _same(headers["x-gitlab-token"], self.secret.decode("utf-8", "replace"))
        else:
            good = False
        return signed if good else None

    def _standard(self, headers: Mapping[str, str], body: bytes, wall: float) -> str | None:
        """Check the signature over id, time and body that GitLab's signing tokens make."""
        identity, at = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
        if not re.fullmatch(r"[0-9]{1,12}", at) or abs(wall - int(at)) > WINDOW_S:
            return None
        told = hmac.new(
            _signing_key(self.secret), f"{identity}.{at}.".encode() + body, hashlib.sha256
        ).digest()
        expected = "v1," + base64.b64encode(told).decode()
        offered = headers["webhook-signature"].split(" ")[:8]
        matches = [_same(word, expected) for word in offered]
        return expected if any(matches) else None


def _same(offered: str, expected: str) -> bool:
    return hmac.compare_digest(
        offered.encode("utf-8", "replace"), expected.encode("utf-8", "replace")
    )


def _signing_key(secret: bytes) -> bytes:
    """Give the key of a `whsec_` token, which is base64 of it; any other secret is the key itself."""
    text = secret.removeprefix(b"whsec_")
    if text == secret:
        return secret
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return secret
