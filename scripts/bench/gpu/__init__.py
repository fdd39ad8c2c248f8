"""`make bench-gpu`: one GPU's figures in about ten minutes, without a network, each printed as soon as it is known.

python -m scripts.bench.gpu steps checkpoints measures only these; --device cpu tries everything out, with small models.
"""
