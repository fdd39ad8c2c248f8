"""A dictionary of a task's arguments that records which keys the task reads.

A key that is never read could be misspelled.
"""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

from sunspot.spelling import find_meant


class TaskArguments(dict[str, Any]):
    """A dictionary that records which of its keys are read. Iterating over it or copying it counts as reading all keys.

    Pickling preserves this record.
    """

    def __init__(self, arguments: Mapping[str, Any], read: Iterable[str] = ()) -> None:
        super().__init__(arguments)
        self._read = set(read)

    def describe_unread(self) -> str:
        """Return a message about the keys that have not been read, with a likely correction, or '' if all were read."""
        unread = [key for key in plain(self) if key not in self._read]
        if not unread:
            return ""
        asked = sorted(self._read)
        nearest = find_meant(unread[0], asked)
        known = f"it reads {', '.join(asked)}" if asked else "it reads no arguments"
        meant = f"did you mean {nearest}?" if nearest else known
        return f"the task has not read {', '.join(unread)}; {meant}"

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskArguments, (plain(self), sorted(self._read))

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        return self._read_all().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._read_all().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._read_all().items()

    def copy(self) -> dict[str, Any]:
        return self._read_all()

    def __or__(self, other: Any) -> Any:
        return self._read_all() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._read_all()

    def _read_all(self) -> dict[str, Any]:
        arguments = plain(self)
        self._read.update(arguments)
        return arguments


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments as a dictionary, without recording that they were read."""
    return dict(dict.items(arguments))
