"""Opens datasets, orders their rows and loads each worker's rows.

1. `task_rows.open_rows_of_task` opens the training rows and the held-out rows. Each is a `source.Source`, which reads
rows by row group.

2. By default, `image_sources.find_sources` opens images: the bundled digits, MNIST, or image files. A task's own
`find_sources` calls `table.open_table` for other columns, `packing.open_packed` for lists of tokens or
`text.open_text` for bytes of text. `torch_dataset.open_datasets` calls a task's `build_dataset`.

3. `dataset_files.list_files` lists a dataset's files on disk or in a bucket. For an Iceberg table,
`iceberg.find_snapshot` lists the files instead. `disk_cache.DiskCache` caches data from buckets on the node's disk.
`table_files.open_table_file` opens a file of any supported format. Tar files need an index, which `tar_index` writes.
`columns.Column` converts a file's values to arrays. `labels` assigns a number to each class.

4. `held_out.hold_out` holds out rows if TEST_SHARE is set. `mixed_source.open_mixture` opens each source of a mixture
like a single dataset, and joins the sources.

5. `order.RunOrder` and `order.Steps` assign rows to steps and to workers.

6. `torch_loader.TorchLoader` (LOADER=torch) keeps all rows in memory, and `ray_loader.RayLoader` (LOADER=ray) streams
them with Ray Data.
"""
