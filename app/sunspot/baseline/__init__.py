"""Trains ResNet-18 on digits in plain PyTorch. docs/tutorial.ipynb starts from it and makes it distributed."""
