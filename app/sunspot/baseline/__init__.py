"""The same task in plain PyTorch, on one device and without Ray: what the training program is measured against."""
