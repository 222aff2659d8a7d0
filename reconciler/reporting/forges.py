"""The table of forges: a new one is one module and one line here."""

from __future__ import annotations

from typing import Final

from reconciler.reporting import gitea, github, gitlab
from reconciler.reporting.base import Forge

FORGES: Final[dict[str, Forge]] = {"github": github, "gitlab": gitlab, "gitea": gitea}
