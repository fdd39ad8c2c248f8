"""Trains ResNet-18 on digits in plain PyTorch. docs/tutorial.ipynb begins with it, and makes it distributed."""
