"""What a run shows while it trains: its metrics, progress on the terminal, and Prometheus metrics."""
