"""Read the pickles of CIFAR-100 without Python's unpickler: a parser of the instructions those files use.

    content = read_plain(Path("cifar-100-python/train").read_bytes())       # {b"data": (N,3072) uint8, ...}

Nothing is imported or called. The few names that an array of bytes needs are symbols here, and the parser itself
implements them. Supported are the instructions of the official files (protocol 2, from Python 2) and of the same
content saved again by Python 3 (protocols 2 to 5); time and memory are bounded by the length of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_BYTES = 1 << 29  # of a file; the official `train` has 155 MB
MOST_INSTRUCTIONS = 4_000_000  # the official `train` has about 450,000
MOST_DEPTH = 16  # nested containers


class RefusedPickle(ValueError):
    """A pickle that asks for more than plain values and arrays of bytes."""


@dataclass(frozen=True)
class _Symbol:
    module: str
    name: str


class _Uint8:
    """The dtype of bytes; numpy writes its state separately."""

    complete = False


class _Array:
    """The result of `_reconstruct`: an array without content yet."""


_RECONSTRUCT = (_Symbol("numpy.core.multiarray", "_reconstruct"), _Symbol("numpy._core.multiarray", "_reconstruct"))
_NDARRAY, _DTYPE, _ENCODE = _Symbol("numpy", "ndarray"), _Symbol("numpy", "dtype"), _Symbol("_codecs", "encode")
_KNOWN = {*_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE}
_UINT8_STATE = (3, "|", None, None, None, -1, -1, 0)  # version, byte order, no fields, no size, no flags
_MARK = object()
_SCALAR = (type(None), bool, int, bytes, str)
_SHARED = (*_SCALAR, _Symbol, _Uint8)  # may be referenced again: no cycles, no growth


def read_plain(data: bytes) -> Any:
    """The value of a pickle of dicts, lists, numbers, texts and arrays of bytes.

    Raises:
        RefusedPickle: it asks for anything else.
        EOFError: it is cut short.
        ValueError: its instructions make no value.
    """
    if len(data) > MOST_BYTES:
        raise RefusedPickle(
            f"it has {len(data):,} bytes, more than any CIFAR-100 file ({MOST_BYTES:,} at most): refused"
        )
    return _Parser(data).value()


class _Parser:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded = 0

    def value(self) -> Any:
        for _ in range(MOST_INSTRUCTIONS):
            code = self.take(1)
            if code == b".":
                if len(self.stack) != 1 or self.marks:
                    raise ValueError("it ends in the middle of a value")
                return self.stack[0]
            if code not in _INSTRUCTIONS:
                raise RefusedPickle(f"it uses the pickle instruction {code!r}, which images and labels do not need: "
                                    "refused, nothing was run; get CIFAR-100 from its official source")  # fmt: skip
            _INSTRUCTIONS[code](self)
        raise RefusedPickle(f"it has more than {MOST_INSTRUCTIONS:,} instructions: refused")

    # Bytes

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise EOFError(f"it ends at byte {len(self.data):,}, before the value does")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + 200)
        if end < 0:
            raise EOFError("a name has no end")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    # Stack

    def pop(self, count: int) -> list[Any]:
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) - count < floor:
            raise ValueError("an instruction finds too few values")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def pop_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError("a container ends that did not begin")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def top(self, kind: type) -> Any:
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor or not isinstance(self.stack[-1], kind):
            raise ValueError(f"a {kind.__name__} is expected and not there")
        return self.stack[-1]

    def mark(self) -> None:
        if len(self.marks) >= MOST_DEPTH:
            raise RefusedPickle(f"it is nested deeper than {MOST_DEPTH} levels: refused")
        self.marks.append(len(self.stack))

    def push_tuple(self, values: list[Any]) -> None:
        flat = [member for value in values for member in (value if isinstance(value, tuple) else (value,))]
        if len(values) > 16 or not all(isinstance(member, _SHARED) for member in flat):
            raise RefusedPickle("it nests values deeper than an array does: refused")
        self.stack.append(tuple(values))

    # Memo

    def put(self, index: int) -> None:
        self.memo[index] = self.top(object)

    def get(self, index: int) -> None:
        if index not in self.memo:
            raise ValueError(f"it names a value that is not there ({index})")
        value = self.memo[index]
        if not isinstance(value, _SHARED):
            raise RefusedPickle("it names a container twice, which images and labels do not need: refused")
        self.stack.append(value)

    # Containers

    def append(self, values: list[Any]) -> None:
        if not all(isinstance(value, _SCALAR) for value in values):
            raise RefusedPickle("a list in it holds more than numbers and texts: refused")
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.top(dict)
        keys = values[::2]
        if len(values) % 2 or not all(isinstance(key, (bytes, str, int)) for key in keys):
            raise ValueError("the keys of a dict must be texts")
        if not all(isinstance(value, (*_SCALAR, list, np.ndarray)) for value in values):
            raise RefusedPickle("its dict holds more than numbers, texts, lists and arrays: refused")
        target.update(zip(keys, values[1::2], strict=True))

    # Names, and what they stand for

    def symbol(self, module: Any, name: Any) -> None:
        found = _Symbol(str(module), str(name))
        if found not in _KNOWN:
            raise RefusedPickle(
                f"this pickle asks for {found.module:.60}.{found.name:.60}, which images and labels do not need: "
                "refused, nothing was run; get CIFAR-100 from its official source"
            )
        self.stack.append(found)

    def reduce(self) -> None:
        function, arguments = self.pop(2)
        if function == _ENCODE and _are(arguments, str, str):
            if arguments[1] != "latin1":
                raise RefusedPickle(f"this pickle asks for the codec {arguments[1]!r:.60}, which plain data does not "
                                    "need: refused")  # fmt: skip
            self.encoded += len(arguments[0])
            if self.encoded > len(self.data):
                raise RefusedPickle("it grows beyond its own length: refused")
            self.stack.append(arguments[0].encode("latin1"))
        elif function in _RECONSTRUCT and _are(arguments, _Symbol, tuple, (str, bytes)) and arguments[:2] == (
            _NDARRAY, (0,)):  # fmt: skip
            self.stack.append(_Array())
        elif function == _DTYPE and _are(arguments, (str, bytes), int, int):
            if _text(arguments[0]) != "u1":
                raise RefusedPickle(
                    f"it holds an array of {_text(arguments[0])!r:.20}, and images are bytes (u1): refused"
                )
            self.stack.append(_Uint8())
        else:
            raise RefusedPickle("it calls a name with other arguments than an array of bytes needs: refused")

    def build(self) -> None:
        target, state = self.pop(2)
        if isinstance(target, _Uint8) and isinstance(state, tuple):
            if tuple(_text(value) if isinstance(value, bytes) else value for value in state) != _UINT8_STATE:
                raise RefusedPickle("it gives bytes (u1) another state than numpy does: refused")
            target.complete = True
            self.stack.append(target)
        elif isinstance(target, _Array) and _are(state, int, tuple, _Uint8, int, bytes):
            _, shape, kind, by_column, content = state
            sides = all(type(side) is int and 0 <= side <= MOST_BYTES for side in shape)
            if not (kind.complete and sides and len(shape) <= 4 and not by_column):
                raise RefusedPickle("it describes an array that no CIFAR-100 file has: refused")
            if int(np.prod(shape, dtype=object)) != len(content):
                raise ValueError(f"an array of shape {shape} cannot have {len(content):,} bytes")
            self.stack.append(np.frombuffer(content, np.uint8).reshape(shape))
        else:
            raise RefusedPickle("it sets the state of something that is no array of bytes: refused")


def _are(values: Any, *kinds: Any) -> bool:
    return type(values) is tuple and len(values) == len(kinds) and all(map(isinstance, values, kinds))


def _text(value: str | bytes) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else value


def _signed(data: bytes) -> int:
    if len(data) > 8:
        raise RefusedPickle("it holds a number of more than 8 bytes: refused")
    return int.from_bytes(data, "little", signed=True)


def _constant(value: Any) -> Callable[[_Parser], None]:
    return lambda p: p.stack.append(value)


def _text_of(form: str) -> Callable[[_Parser], None]:
    return lambda p: p.stack.append(p.take(p.number(form)).decode("utf-8"))


def _bytes_of(form: str) -> Callable[[_Parser], None]:
    return lambda p: p.stack.append(p.take(p.number(form)))


_INSTRUCTIONS: dict[bytes, Callable[[_Parser], Any]] = {
    b"\x80": lambda p: p.take(1),  # PROTO
    b"\x95": lambda p: p.take(8),  # FRAME: its length is not needed
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b"K": lambda p: p.stack.append(p.number("<B")),
    b"M": lambda p: p.stack.append(p.number("<H")),
    b"J": lambda p: p.stack.append(p.number("<i")),
    b"\x8a": lambda p: p.stack.append(_signed(p.take(p.number("<B")))),  # LONG1
    b"U": _bytes_of("<B"),  # SHORT_BINSTRING: a text of Python 2, which is bytes
    b"T": _bytes_of("<i"),  # BINSTRING
    b"C": _bytes_of("<B"),  # SHORT_BINBYTES
    b"B": _bytes_of("<I"),  # BINBYTES
    b"\x8e": _bytes_of("<Q"),  # BINBYTES8
    b"X": _text_of("<I"),  # BINUNICODE
    b"\x8c": _text_of("<B"),  # SHORT_BINUNICODE
    b"}": lambda p: p.stack.append({}),
    b"]": lambda p: p.stack.append([]),
    b")": lambda p: p.stack.append(()),
    b"(": _Parser.mark,
    b"t": lambda p: p.push_tuple(p.pop_mark()),
    b"\x85": lambda p: p.push_tuple(p.pop(1)),
    b"\x86": lambda p: p.push_tuple(p.pop(2)),
    b"\x87": lambda p: p.push_tuple(p.pop(3)),
    b"a": lambda p: p.append(p.pop(1)),
    b"e": lambda p: p.append(p.pop_mark()),
    b"s": lambda p: p.set_items(p.pop(2)),
    b"u": lambda p: p.set_items(p.pop_mark()),
    b"q": lambda p: p.put(p.number("<B")),
    b"r": lambda p: p.put(p.number("<I")),
    b"\x94": lambda p: p.put(len(p.memo)),  # MEMOIZE
    b"h": lambda p: p.get(p.number("<B")),
    b"j": lambda p: p.get(p.number("<I")),
    b"c": lambda p: p.symbol(p.line(), p.line()),
    b"\x93": lambda p: p.symbol(*p.pop(2)),
    b"R": _Parser.reduce,
    b"b": _Parser.build,
}
