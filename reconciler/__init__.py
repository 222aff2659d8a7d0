"""Reconcile LLM inference servers on GPU hosts with committed specs."""
