"""Digits with ResNet-18 in plain PyTorch: where docs/tutorial.ipynb begins."""
