"""Lists the data files in a snapshot of an Iceberg table (Iceberg table specification, versions 1 to 3).

    metadata/00003-<uuid>.metadata.json    schemas and snapshots
    metadata/snap-<id>-<uuid>.avro         a snapshot's manifest list
    metadata/<uuid>-m0.avro                a manifest, which lists Parquet files with their status

No catalog is used. The metadata file with the highest number in its name describes the table's current state.
"""

import gzip
import json
import re
from typing import Any

from sunspot.background import map_parallel
from sunspot.data.avro import read_avro
from sunspot.data.dataset_files import DatasetFiles, file_size, join, list_all, list_folders, read_range
from sunspot.errors import DataError, shorten
from sunspot.formatting import some_of

METADATA = "metadata"
"""The subfolder of a table that contains everything except the rows."""

METADATA_FILE = re.compile(r"v?([0-9]*).*\.metadata\.json")
"""Pattern for the name of a metadata file, such as v3.metadata.json or 00003-<uuid>.metadata.json.
The group is its number."""

SNAPSHOT = re.compile(r"(.+)@([0-9]+)")
"""Pattern for a table's location that is followed by `@` and the ID of a snapshot."""

SCHEME = re.compile(r"^([a-z0-9+]+:)?[./]*/")
"""Pattern for the beginning of a path, such as s3:// or file:///. Paths in the same table can begin differently."""

DELETED = 2
"""The status of a file that a snapshot no longer contains."""


def find_snapshot(location: str) -> DatasetFiles | None:
    """List the data files of an Iceberg table's current snapshot, or of snapshot N if `location` ends with `@N`.

    Returns None if `location` is not an Iceberg table. Raises `DataError` if the rows cannot be read from Parquet files
    alone.
    """
    match = SNAPSHOT.fullmatch(location)
    table = match[1] if match else location
    names = list_all(join(table, METADATA)).sizes if METADATA in list_folders(table) else {}
    numbers = {name: int(found[1] or 0) for name in names if (found := METADATA_FILE.fullmatch(name))}
    newest = [join(table, f"{METADATA}/{name}") for name in numbers if numbers[name] == max(numbers.values())]
    if not newest:
        return None
    if len(newest) > 1:
        raise DataError(
            f"{' and '.join(newest)}: only one of these can be current; delete the files that the catalog does not use"
        )
    try:
        content = _read_file(newest[0])
        state = json.loads(gzip.decompress(content) if ".gz." in newest[0] else content)
        snapshots = {each["snapshot-id"]: each for each in state.get("snapshots", [])}
        number = int(match[2]) if match else state.get("current-snapshot-id")
        if number not in snapshots:
            raise DataError(
                f"{table} has no snapshot {number} (available: {some_of(sorted(map(str, snapshots))) or 'none'}); "
                f"set SUNSPOT_DATASET={table}@ID to choose an available snapshot, or append rows if the table is empty"
            )
        schemas = {schema["schema-id"]: schema for schema in state.get("schemas", [])}
        schema = schemas.get(snapshots[number].get("schema-id", state.get("current-schema-id"))) or state["schema"]
        files = _list_data_files(table, state["location"], snapshots[number]["manifest-list"])
        note = f"{table}: reading snapshot {number}; if the table changes, resume with SUNSPOT_DATASET={table}@{number}"
        return DatasetFiles(table, files, (note,), {field["name"]: field["id"] for field in schema["fields"]})
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise DataError(f"{newest[0]} does not describe an Iceberg table, or is damaged: {shorten(error)}") from error


def _list_data_files(table: str, root: str, manifest_list: str) -> list[str]:
    """Return the sorted paths of a snapshot's data files, relative to the table's folder.

    `root` is the folder's path according to the metadata. It differs from `table` if the table was copied.
    """

    def read(path: str) -> list[Any]:
        there = join(table, _below(root, path))
        return read_avro(_read_file(there), there)

    manifests = map_parallel(read, [manifest["manifest_path"] for manifest in read(manifest_list)])
    files = [entry["data_file"] for manifest in manifests for entry in manifest if entry["status"] != DELETED]
    wrong = [file["file_path"] for file in files if file.get("content") or file["file_format"].upper() != "PARQUET"]
    if wrong or not files:
        fault = (
            f"has delete files, or files in formats other than Parquet ({wrong[0]}); run Iceberg's rewrite_data_files "
            "with the options rewrite-all=true and remove-dangling-deletes=true"
            if wrong
            else "has no rows; append rows to the table"
        )
        raise DataError(f"{table} {fault}")
    return sorted({_below(root, file["file_path"]) for file in files})


def _below(root: str, path: str) -> str:
    """Return `path` relative to `root`. Raises `DataError` if `path` is outside `root`."""
    above = SCHEME.sub("", root).rstrip("/") + "/"
    plain = SCHEME.sub("", path)
    if not plain.startswith(above):
        raise DataError(f"{path} is outside its Iceberg table's folder {root}; rewrite the table in a single folder")
    return plain.removeprefix(above)


def _read_file(path: str) -> bytes:
    return read_range(path, 0, file_size(path))
