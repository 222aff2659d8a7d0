"""Rehearsal hosts: systemd hosts by namespaces, and the one simulated host."""
