"""Nested Python state in a checkpoint, so that it comes back exactly as it was. Pure.

DCP stores nested state as a flat set of keys and forgets what held them: a tuple, an ordered dict, a key that is a
number, a dict that is empty. Where that would change anything, the outline of the state is stored beside it: the same
containers, with the name of the flat key in the place of each value.
"""

import collections
import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_fsspec.errors import IncompatibleStateError

logger = logging.getLogger(__name__)

OUTLINE_KEY = "_dcp_fsspec_outline"

Path = tuple[str | int, ...]


def flatten(state: Mapping[str, Any], what: str) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the flat keys and values by which DCP stores `state`, and the path of each key.

    Raises:
        IncompatibleStateError: two places in it have the same flat key.
    """
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    try:
        planner.set_up_planner(dict(state))
    except ValueError as error:
        raise IncompatibleStateError(
            f"two values of {what} would be stored under one name ({error}), such as {{'a': {{'b': 1}}, 'a.b': 2}}. "
            "Rename one of the keys."
        ) from error
    return dict(planner.state_dict), dict(planner.mappings)


def nest(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the nested form of `flat`: numbers in a path are places in a list, all else are keys.

    The order of the keys in `flat` is that of dicts, and says nothing about lists.
    """
    tree = _Branch()
    for key, value in flat.items():
        path = paths.get(key, (key,))
        branch = tree
        for step in path[:-1]:
            branch = branch.setdefault(step, _Branch())
            if not isinstance(branch, _Branch):
                raise IncompatibleStateError(f"{key!r} in the checkpoint lies inside a value of its own")
        branch[path[-1]] = value
    return {str(name): _grown(one) for name, one in tree.items()}


class _Branch(dict[str | int, Any]):
    """A dict or a list that is not complete yet."""


def _grown(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    if not all(isinstance(step, int) for step in node):
        return {name: _grown(one) for name, one in node.items()}
    places = sorted(node)
    if places != list(range(len(places))):
        raise IncompatibleStateError(f"a list in the checkpoint has the elements {places} only")
    return [_grown(node[place]) for place in places]


def with_outline(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `state`, with an outline if it needs one to come back as it is.

    Raises:
        IncompatibleStateError: see `flatten`.
    """
    flat, paths = flatten(state, what)
    if _same(nest(flat, paths), dict(state)):
        return dict(state)
    keys = {path: key for key, path in paths.items()}
    return {**state, OUTLINE_KEY: [_outline(dict(state), (), keys)]}


def restore(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the state that was saved, from its flat keys and values, whatever part of them is there."""
    outline = flat.get(OUTLINE_KEY)
    if outline is None:
        return nest(flat, paths)
    state: dict[str, Any] = _filled(outline[0], flat)
    return state


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return list(one) == list(other) and all(
            type(a) is type(b) and _same(one[a], other[b]) for a, b in zip(one, other, strict=True)
        )
    if type(one) is list:
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return False


# An outline is made of lists and strings alone, which every loader takes: ["value", flat key], ["list", element, ...],
# ["dict", type, [[key, element], ...]].

_MAPPINGS: Mapping[str, Callable[[], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "defaultdict of int": lambda: collections.defaultdict(int),
    "defaultdict of float": lambda: collections.defaultdict(float),
    "defaultdict of list": lambda: collections.defaultdict(list),
    "defaultdict of dict": lambda: collections.defaultdict(dict),
    "defaultdict of set": lambda: collections.defaultdict(set),
}


def _kind(mapping: Mapping[Any, Any]) -> str:
    kind = type(mapping).__name__
    if isinstance(mapping, collections.defaultdict):
        kind = f"defaultdict of {getattr(mapping.default_factory, '__name__', '')}"
    if kind not in _MAPPINGS:
        logger.warning("a %s in the state will come back as a dict", type(mapping).__qualname__)
        return "dict"
    return kind


def _outline(value: Any, path: Path, keys: Mapping[Path, str]) -> list[Any]:
    if path in keys:
        return ["value", keys[path]]
    if isinstance(value, Mapping):
        entries = [[name, _outline(one, (*path, str(name)), keys)] for name, one in value.items()]
        return ["dict", _kind(value), entries]
    return ["list", *(_outline(one, (*path, place), keys) for place, one in enumerate(value))]


def _filled(node: list[Any], flat: Mapping[str, Any]) -> Any:
    if node[0] == "value":
        return flat.get(node[1])
    if node[0] == "list":
        return [_filled(one, flat) for one in node[1:]]
    mapping = _MAPPINGS[node[1]]()
    for name, one in node[2]:
        mapping[name] = _filled(one, flat)
    return mapping
