"""The benchmarks: each measures the product and its yardstick alternately in one run, and reports medians."""
