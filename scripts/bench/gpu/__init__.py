"""`make bench-gpu`: measures a GPU within ten minutes, and prints and stores each figure at once.

It trains in its own process, without Ray, and needs only torch, torchvision, NumPy, pyarrow, Pillow and pydantic. Only
the subject `product` needs Ray, and is left out where Ray is not installed. Copy the repository to the machine with the
GPU, and run `PYTHONPATH=app:. python -m scripts.bench.gpu`. What does not fit into the time is left out, and a line
says so.

`python -m scripts.bench.gpu digits gpt2` measures only these subjects. `--device cpu` tries all of them out with tiny
sizes. The results are written to the folder that OUT names, by default `bench-gpu`: `table.md` has the lines that are
printed, and `turns.jsonl` the figures of each turn.
"""
