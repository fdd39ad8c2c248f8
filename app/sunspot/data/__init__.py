"""Rows: opening a dataset, the order of its rows, and loading them on each worker.

1. `task_rows.open_rows_of_task` opens the training rows and the held-out rows. Each is a `source.Source`, which reads
rows by row group.

2. If the task has no function for its rows, `image_sources.find_sources` opens images: the bundled digits, MNIST, or
files. A task's own `find_sources` calls `table.open_table` for other columns, `packing.open_packed` for lists of tokens
or `text.open_text` for bytes of text. A task's `build_dataset` goes through `torch_dataset.open_datasets`.

3. `dataset_files.list_files` lists a dataset's files on disk or in a bucket. `table_files.open_table_file` opens each
file, whatever its format, and `columns.Column` turns its values into arrays. `labels` numbers the classes.

4. `held_out.hold_out` holds out rows if TEST_SHARE is set.

5. `order.Steps` and `order.Order` decide which rows each step takes, and which of them each worker takes.

6. `torch_loader.TorchLoader` (LOADER=torch) keeps all rows in memory, and `ray_loader.RayLoader` (LOADER=ray) streams
them with Ray Data.
"""
