"""What every test of this repository shares: the order of tiers, and the lab's fixtures.

`tests/` is on the path (see `pythonpath` in pyproject.toml), so helpers are imported by their plain
names: `from lab_hosts import …`. The package itself is always the installed one.
"""

from reconciler.logs import configure

pytest_plugins = ["lab_hosts", "tiers"]

configure({"RECONCILER_LOG": "error"})
