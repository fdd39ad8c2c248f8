"""`make bench-failures`: compare Sunspot, the loop from Ray's guides, and TorchFT under the same losses of nodes."""
