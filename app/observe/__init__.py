"""What a run shows of itself while it trains: numbers, progress, output, metrics for Prometheus."""
