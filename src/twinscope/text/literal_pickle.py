"""Reading the plain values in a pickle without unpickling it.

Covers dictionaries, lists, tuples, strings, whole numbers, booleans and None, as nanoGPT's ``meta.pkl``
holds them. Everything else in the format (classes, calls, bytes, floats, persistent ids) is refused:
the opcodes are read as data by ``pickletools``, and no name in the file is ever looked up.
"""

from __future__ import annotations

import pickletools
from typing import Any

_MARK = object()
_SILENT = ("PROTO", "FRAME", "STOP")
_INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_STRINGS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_literal_pickle(data: bytes) -> Any:
    """The value of a pickle of any protocol that holds built-in containers, strings and integers only.

    Raises:
        ValueError: the bytes are no pickle, are cut short, or need anything but plain values; the message
            is a clause naming the offending opcode.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            _apply(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"it is malformed ({error})") from None
    if len(stack) != 1 or stack[0] is _MARK:
        raise ValueError(f"it is malformed ({len(stack)} values instead of one)")
    return stack[0]


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    if name in _SILENT:
        return
    if name in _INTEGERS or name in _STRINGS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name == "MARK":
        stack.append(_MARK)
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
        memo[argument] = stack[-1]
    elif name in ("GET", "BINGET", "LONG_BINGET"):
        stack.append(memo[argument])
    elif name in _TUPLES:
        items = [stack.pop() for _ in range(_TUPLES[name])]
        stack.append(tuple(reversed(items)))
    elif name == "TUPLE":
        stack.append(tuple(_since_mark(stack)))
    elif name in ("LIST", "DICT"):
        items = _since_mark(stack)
        stack.append(items if name == "LIST" else _pairs(items))
    elif name in ("APPEND", "APPENDS"):
        items = [stack.pop()] if name == "APPEND" else _since_mark(stack)
        _container(stack, list).extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else _since_mark(stack)
        _container(stack, dict).update(_pairs(items))
    else:
        raise ValueError(f"it holds more than plain values (opcode {name})")


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _container(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise TypeError(f"items for a {kind.__name__} that is none")
    return stack[-1]
