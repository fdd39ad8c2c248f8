"""Finds the images and classes in datasets that have one folder per class."""

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
"""Files that macOS and Windows create in folders, in lower case."""

JUNK_PREFIX = "._"
"""Prefix of files in which macOS stores metadata."""

JUNK_FOLDERS = ("__MACOSX", "@eaDir")
"""Metadata folders in archives made by macOS, and thumbnail folders created by Synology devices."""

MAX_KINDS_NAMED = 5
"""Largest number of file kinds, and of classes without images, that a message lists."""


@dataclass(frozen=True)
class ClassFolders:
    """The images of a dataset with one folder per class."""

    location: str
    pictures: dict[str, int]
    "The size of each image in bytes, keyed by path below `location`, in row order."
    root: str
    "The class folders' prefix below `location`: '', or 'train/' if only that folder contains images."
    without_pictures: dict[str, str]
    "Descriptions of the files in class folders without images, keyed by folder. Only the first few are included."
    unread: str
    "A description of the files that are not read, or an empty string."

    def class_of(self, name: str) -> str:
        """Return an image's class, which is the name of its outermost folder."""
        return name.removeprefix(self.root).partition("/")[0]

    def describe(self) -> tuple[str, ...]:
        """Return notes for the user about unread files and nested folders."""
        notes = [f"{self.location}: not read: {self.unread}"] if self.unread else []
        deeper = next((name for name in self.pictures if name.removeprefix(self.root).count("/") > 1), "")
        if deeper:
            notes.append(
                f"{self.location}: images in nested folders get the class of the outermost folder; for example, "
                f"{deeper} has the class {self.class_of(deeper)}"
            )
        return tuple(notes)

    def refuse_lost_classes(self) -> None:
        """Raise `DataError` if a class folder contains no images, because its class would be missing."""
        if self.without_pictures:
            lost = ", ".join(f"{folder}/ ({files})" for folder, files in self.without_pictures.items())
            raise DataError(
                f"{self.location}: the class folders {lost} contain no readable images; move these folders out of the "
                f"dataset, or convert their files to {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
            )

    def refuse_wrong_level(self) -> None:
        """Raise `DataError` if the class folders seem to be at a deeper level than expected."""
        folders = {os.path.dirname(name) for name in self.pictures}
        common = os.path.commonpath(folders)
        if len({self.class_of(name) for name in self.pictures}) == 1 and common not in folders:
            raise DataError(
                f"{self.location}: all images would have the same class, {self.class_of(next(iter(self.pictures)))}; "
                f"set SUNSPOT_DATASET to {join(self.location, common)}, which contains the class folders"
            )


def find_classes(location: str, listing: Listing) -> ClassFolders:
    """Return a dataset's images and their classes.

    Raises `DataError` if there are no images, or if training and held-out rows are mixed.
    """
    kept = [name for name in listing.sizes if not _is_junk(name)]
    visible = [name for name in kept if not _is_below_hidden(name)]
    pictures = [name for name in visible if "/" in name and is_picture(name)]
    unread = _describe_unread(kept, set(pictures), listing.others)
    if not pictures:
        raise DataError(
            f"{location} contains no folders of images ({unread or 'it is empty'}); put the images of each class "
            f"(files with the suffix {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}) into a separate folder"
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
    """Return the prefix of the class folders: the training folder if there is one, otherwise an empty string."""
    outermost = sorted({folder.partition("/")[0] for folder in folders})
    train = next((name for name in outermost if name.lower() in TRAINING and name not in folders), "")
    others = [name for name in outermost if name != train]
    if train and others:
        raise DataError(
            f"{location}: {train}/ contains class folders, but {others[0]}/ next to it also contains images; set "
            f"SUNSPOT_DATASET to {join(location, train)}"
        )
    return f"{train}/" if train else ""


def _is_junk(name: str) -> bool:
    """Return True if a file was created by an operating system rather than the user."""
    *folders, file = name.split("/")
    return file.lower() in JUNK_FILES or file.startswith(JUNK_PREFIX) or not set(JUNK_FOLDERS).isdisjoint(folders)


def _is_below_hidden(name: str) -> bool:
    return any(folder.startswith(".") for folder in name.split("/")[:-1])


def _describe_unread(names: list[str], pictures: set[str], others: Sequence[str]) -> str:
    """Return a description of the files that are not read, the most frequent kind first."""
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if _is_below_hidden(name):
            kinds["file", " in hidden folders"].append(name)
        elif not is_picture(name):
            kinds[_kind_of(name)].append(name)
        elif name not in pictures:
            kinds["image", " outside the class folders"].append(name)
    if others:
        kinds["broken link", " or similar"].extend(others)
    ranked = sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0]))
    named = [
        f"{plural(len(found), noun)}{rest}, such as {min(found)}" for (noun, rest), found in ranked[:MAX_KINDS_NAMED]
    ]
    unnamed = sum(len(found) for _, found in ranked[MAX_KINDS_NAMED:])
    return "; ".join([*named, *([plural(unnamed, "other file")] if unnamed else [])])


def _describe_kinds(names: Iterable[str]) -> str:
    """Return a description of a folder's files, such as "8 .heic files"."""
    counts = Counter(map(_kind_of, names)).most_common(MAX_KINDS_NAMED)
    return ", ".join(f"{plural(number, noun)}{rest}" for (noun, rest), number in counts) or "empty"


def _kind_of(name: str) -> tuple[str, str]:
    """Return a file's kind as a noun and the words that follow the noun, such as ("file", " without suffix")."""
    suffix = os.path.splitext(name)[1]
    return (f"{suffix} file", "") if suffix else ("file", " without suffix")
