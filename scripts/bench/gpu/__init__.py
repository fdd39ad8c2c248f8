"""`make bench-gpu`: measure a GPU in about ten minutes without a network, and print each figure at once.

`python -m scripts.bench.gpu steps checkpoints` measures only these subjects. `--device cpu` tries everything out with
small models.
"""
