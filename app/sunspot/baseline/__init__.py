"""Trains ResNet-18 on digits in plain PyTorch. docs/tutorial.ipynb makes this program distributed."""
