"""`python -m reconciler` is `reconcile`."""

from reconciler.cli.entry import main

main()
