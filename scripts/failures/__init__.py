"""`make bench-failures`: the same task through the same losses, under Sunspot, the usual loop, and TorchFT."""
