"""The benchmarks: each measures the product beside its yardstick, in turns in one run, and quotes medians."""
