"""The benchmark client: streams, load, workloads, quality."""
