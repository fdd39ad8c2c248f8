"""Datasets with a folder of pictures for each class: which files are read, and which class each of them belongs to."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sunspot.data.dataset_files import Listing, join
from sunspot.data.images import SUFFIXES, is_picture
from sunspot.data.splits import TRAINING, refuse_mixed_splits
from sunspot.errors import DataError
from sunspot.formatting import plural

JUNK_FILES = (".ds_store", "thumbs.db", "desktop.ini")
"""Files that macOS and Windows leave in folders, in lower case."""

JUNK_PREFIX = "._"
"""Prefix of files in which macOS keeps metadata of other files."""

JUNK_FOLDERS = ("__MACOSX", "@eaDir")
"""Folders of metadata that macOS adds to archives, and of thumbnails that Synology adds to picture folders."""

MAX_KINDS_NAMED = 5
"""Largest number of kinds of unread files, and of lost classes, that a message names."""


@dataclass(frozen=True)
class ClassFolders:
    """Pictures of a dataset that has a folder for each class."""

    location: str
    pictures: dict[str, int]
    "Size in bytes of each picture, by its path below `location`, in the order of the rows."
    root: str
    "Prefix of the class folders below `location`: '', or 'train/' if no other folder contains pictures."
    without_pictures: dict[str, str]
    "Description of the files in class folders that contain no picture. Only the first few folders are listed."
    unread: str
    "Description of the files that are not read; empty if all are read."

    def class_of(self, name: str) -> str:
        """Return the class of a picture: the outermost folder that contains it."""
        return name.removeprefix(self.root).partition("/")[0]

    def describe(self) -> tuple[str, ...]:
        """Return notes for the user on how these pictures are read."""
        notes = [f"{self.location}: not read: {self.unread}"] if self.unread else []
        deeper = next((name for name in self.pictures if name.removeprefix(self.root).count("/") > 1), "")
        if deeper:
            notes.append(
                f"{self.location}: nested pictures belong to the class of the outermost folder, such as {deeper} to "
                f"{self.class_of(deeper)}"
            )
        return tuple(notes)

    def refuse_lost_classes(self) -> None:
        """Raise `DataError` if a class folder contains no picture, because its class would be missing."""
        if self.without_pictures:
            lost = ", ".join(f"{folder}/ ({files})" for folder, files in self.without_pictures.items())
            raise DataError(
                f"{self.location}: no readable picture in {lost}; move such a folder out of the dataset, or "
                f"convert its files to one of the formats {', '.join(SUFFIXES)}"
            )

    def refuse_wrong_level(self) -> None:
        """Raise `DataError` if the class folders seem to be one or more levels deeper."""
        folders = {os.path.dirname(name) for name in self.pictures}
        common = os.path.commonpath(folders)
        if len({self.class_of(name) for name in self.pictures}) == 1 and common not in folders:
            raise DataError(
                f"{self.location}: all pictures would be of one class, {self.class_of(next(iter(self.pictures)))}; set "
                f"SUNSPOT_DATASET to {join(self.location, common)}, which contains the class folders"
            )


def find_classes(location: str, listing: Listing) -> ClassFolders:
    """Find the pictures of a dataset and their classes.

    Raises `DataError` if there are no pictures, or if training and held-out rows are mixed.
    """
    kept = [name for name in listing.sizes if not _is_junk(name)]
    visible = [name for name in kept if not _is_below_hidden(name)]
    pictures = [name for name in visible if "/" in name and is_picture(name)]
    unread = _describe_unread(kept, set(pictures), listing.others)
    if not pictures:
        raise DataError(
            f"{location}: contains no folders of pictures ({unread or 'it is empty'}); put the pictures of each "
            f"class into a folder of its own, with one of the suffixes {', '.join(SUFFIXES)}"
        )
    folders = {os.path.dirname(name) for name in pictures}
    refuse_mixed_splits(location, folders, classes=folders)
    root = _find_root(location, folders)
    classes = {root + name.removeprefix(root).partition("/")[0] for name in pictures}
    outermost = {name for name in listing.folders if name.startswith(root) and "/" not in name.removeprefix(root)}
    lost = {name for name in outermost - classes if not _is_junk(f"{name}/") and not _is_below_hidden(f"{name}/")}
    return ClassFolders(
        location,
        pictures={name: listing.sizes[name] for name in pictures},
        root=root,
        without_pictures={
            folder: _describe_kinds(name for name in visible if name.startswith(f"{folder}/"))
            for folder in sorted(lost)[:MAX_KINDS_NAMED]
        },
        unread=unread,
    )


def _find_root(location: str, folders: set[str]) -> str:
    """Return the prefix of the class folders: the training folder if no other folder contains pictures, else ''."""
    outermost = sorted({folder.partition("/")[0] for folder in folders})
    train = next((name for name in outermost if name.lower() in TRAINING and name not in folders), "")
    others = [name for name in outermost if name != train]
    if train and others:
        raise DataError(
            f"{location}: {train}/ contains the class folders, but {others[0]}/ beside it has pictures, too; "
            f"set SUNSPOT_DATASET to {join(location, train)}"
        )
    return f"{train}/" if train else ""


def _is_junk(name: str) -> bool:
    """Return True for a file that an operating system keeps beside the user's files."""
    *folders, file = name.split("/")
    return file.lower() in JUNK_FILES or file.startswith(JUNK_PREFIX) or not set(JUNK_FOLDERS).isdisjoint(folders)


def _is_below_hidden(name: str) -> bool:
    return any(folder.startswith(".") for folder in name.split("/")[:-1])


def _describe_unread(names: list[str], pictures: set[str], others: Sequence[str]) -> str:
    """Describe the files that are not read, the most frequent kind first."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if _is_below_hidden(name):
            kinds["file", " in hidden folders"].append(name)
        elif not is_picture(name):
            kinds[_kind_of(name)].append(name)
        elif name not in pictures:
            kinds["picture", " outside the class folders"].append(name)
    if others:
        kinds["broken link", " or the like"].extend(others)
    ranked = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    named = [
        f"{plural(len(found), noun)}{rest}, such as {min(found)}" for (noun, rest), found in ranked[:MAX_KINDS_NAMED]
    ]
    unnamed = sum(len(found) for _, found in ranked[MAX_KINDS_NAMED:])
    return "; ".join([*named, *([plural(unnamed, "other file")] if unnamed else [])])


def _describe_kinds(names: Iterable[str]) -> str:
    """Describe the files of a folder that contains no pictures, such as "8 .heic files"."""
    counts = Counter(map(_kind_of, names)).most_common(MAX_KINDS_NAMED)
    return ", ".join(f"{plural(number, noun)}{rest}" for (noun, rest), number in counts) or "empty"


def _kind_of(name: str) -> tuple[str, str]:
    """Return the singular noun for a file's kind, and the words that follow it: (".heic file", "")."""
    suffix = os.path.splitext(name)[1]
    return (f"{suffix} file", "") if suffix else ("file", " without suffix")
