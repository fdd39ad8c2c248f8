"""Recognizes training and held-out rows by folder and file names."""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Set
from typing import NamedTuple

from sunspot.errors import DataError

TRAINING, HELD_OUT = ("train", "training"), ("test", "testing")
"""Folder names of training and held-out rows, compared case-insensitively. A dataset must have both."""

OTHER_HELD_OUT = ("val", "valid", "validation", "eval", "dev")
"""Other common names of held-out rows. They are not read automatically, because their purpose is unclear."""


class SplitFolders(NamedTuple):
    """Two sibling folders, one with the training rows and one with the held-out rows."""

    train: str
    test: str
    others: tuple[str, ...]
    "Other sibling folders that look like training or held-out rows. They are not read."


def pair_folders(names: Iterable[str], held_out: Collection[str] = HELD_OUT) -> SplitFolders | None:
    """Return the training and held-out folders among `names`, or None if either is missing."""
    folders = sorted(names, key=lambda name: (name not in (TRAINING[0], HELD_OUT[0]), name))
    trains = [name for name in folders if name.lower() in TRAINING]
    tests = [name for name in folders if name.lower() in held_out]
    if not trains or not tests:
        return None
    known = {*TRAINING, *HELD_OUT, *OTHER_HELD_OUT}
    rest = [name for name in folders if name.lower() in known and name not in (trains[0], tests[0])]
    return SplitFolders(trains[0], tests[0], tuple(rest))


def refuse_mixed_splits(location: str, paths: Iterable[str], classes: Set[str] = frozenset()) -> None:
    """Raise `DataError` if the names in `paths` suggest that a folder contains both training and held-out rows.

    Names such as "train" and "test", or "training_set" and "test_set", suggest this. However, two names that contain
    other words as well are allowed if one of the names is in `classes`, because a class folder can be called
    "train station" or "test tube".
    """
    children: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        above = ""
        for name in path.split("/"):
            children[above].add(name)
            above = f"{above}/{name}" if above else name
    for folder, names in sorted(children.items()):
        trains = sorted(name for name in names if _is_named(name, TRAINING))
        others = sorted(name for name in names if _is_named(name, (*HELD_OUT, *OTHER_HELD_OUT)))
        for train, held_out in itertools.product(trains, others):
            is_whole = train.lower() in TRAINING or held_out.lower() in (*HELD_OUT, *OTHER_HELD_OUT)
            both = [f"{folder}/{name}".lstrip("/") for name in (train, held_out)]
            if is_whole or classes.isdisjoint(both):
                shown = [f"{path.rpartition('/')[2]}{'/' * (path in children or path in classes)}" for path in both]
                raise DataError(
                    f"{location}{'/' * bool(folder)}{folder} contains {' and '.join(shown)}, and both would be used "
                    f"for training; set SUNSPOT_DATASET to {location}/{both[0]} and SUNSPOT_TEST_DATASET to "
                    f"{location}/{both[1]}, or move the rows into the folders train/ and test/"
                )


def _is_named(name: str, words: Collection[str]) -> bool:
    """Return True if a name contains one of these words, and no word for a different split."""
    found = set(re.findall("[a-z]+", name.lower())) & {*TRAINING, *HELD_OUT, *OTHER_HELD_OUT}
    return bool(found) and found <= set(words)
