"""Messages as a malformed peer would write them: real ones, changed at random from a seed."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable, Iterator

FUZZ_S = float(os.environ.get("FUZZ_SECONDS", "0.5"))
"""How long each test that draws messages goes on; a longer run finds more."""

EXTREMES = (
    *(struct.pack("<I", n) for n in (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1)),
    *(struct.pack("<Q", n) for n in (2**61, 2**63 - 1, 2**63, 2**64 - 1)),
    *(struct.pack("<d", x) for x in (float("nan"), float("inf"), -float("inf"), -1.0, 1e308)),
    *(b"\0" * 16, b"\xff" * 16, b"[" * 300, b'{"rank":1e999,', b"NaN", b"-Infinity", b"1e400"),
)


def flip(data: bytearray, draw: random.Random) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def overwrite(data: bytearray, draw: random.Random) -> None:
    """An extreme value, most often where a field begins."""
    at = draw.randrange(len(data) + 1)
    at -= at % draw.choice((1, 2, 4, 8))
    extreme = draw.choice(EXTREMES)
    data[at : at + len(extreme)] = extreme


def insert(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data) + 1)
    data[at:at] = draw.choice((draw.choice(EXTREMES), draw.randbytes(draw.randrange(1, 40))))


def cut(data: bytearray, draw: random.Random) -> None:
    begin = draw.randrange(len(data) + 1)
    del data[begin : begin + draw.choice((1, 2, 4, 8, len(data)))]


def repeat(data: bytearray, draw: random.Random) -> None:
    data += data[draw.randrange(len(data) + 1) :] * draw.randrange(1, 4)


def scramble(data: bytearray, draw: random.Random) -> None:
    data[:] = draw.randbytes(draw.choice((len(data), draw.randrange(2000))))


WAYS = (flip, flip, flip, overwrite, overwrite, overwrite, insert, cut, repeat, scramble)


def mutated(message: bytes, draw: random.Random) -> bytes:
    """The message, changed in one to four ways."""
    data = bytearray(message)
    for _ in range(draw.randrange(1, 5)):
        draw.choice(WAYS)(data, draw)
    return bytes(data)


def draws(seed: object, seconds: float = FUZZ_S) -> Iterator[random.Random]:
    """A generator for each case until the time is over; case n alone is `Random(f"{seed} {n}")`."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        yield random.Random(f"{seed} {number}")
        number += 1


def read(message: bytes, reader: Callable[[bytes], object], allowed: type[Exception]) -> object:
    """What a reader makes of bytes; an error of another type than the allowed one is a failure."""
    try:
        return reader(message)
    except allowed:
        return None
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error} of {message!r}") from error


JSON_VALUES = (
    "1e999", "-1e999", "NaN", "null", "true", "[]", "{}", "[[1]]", '"1"', '"\\ud800"', "-1", "0",
    "1.5", "9" * 30, "1e308", '["x"]', "[1e999]", "[" * 400 + "]" * 400,
)  # fmt: skip


def mutated_json(fields: dict[str, object], draw: random.Random) -> bytes:
    """An object of JSON of which one field or more have another value, or are missing."""
    texts = {name: json.dumps(value) for name, value in fields.items()}
    for _ in range(draw.randrange(1, 3)):
        texts[draw.choice(list(texts))] = draw.choice(JSON_VALUES)
    if draw.random() < 0.2:
        del texts[draw.choice(list(texts))]
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}").encode()
