# SPDX-License-Identifier: Apache-2.0
"""Unified patches with git's headers, made of bytes. Pure: the same changes give the same patch."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Sequence

import attrs

__all__ = ["Budget", "Side", "is_binary", "patch"]

CONTEXT = 3
"""Lines shown around a change, as everywhere."""

TEXT_WITHIN = 8000
"""What has a NUL in its first so many bytes is not text (git's rule)."""

MOST_EDITS = 1000
"""Edits beyond which two texts are taken for different altogether: finding the fewest takes time with their square."""

STEPS = 5_000_000
"""What all texts of one diff may cost together: some seconds. What comes after is shown as replaced as a whole."""

_NO_NEWLINE = b"\\ No newline at end of file\n"
_ESCAPES = {7: b"\\a", 8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 34: b'\\"', 92: b"\\\\"}


@attrs.frozen
class Side:
    """A file or symbolic link before or after."""

    mode: int
    """Git's: 100644, 100755 or 120000 in octal."""
    content: bytes
    """Its bytes; of a link, where it leads."""


class Budget:
    """
    How much may be spent on finding small patches.

    Args:
        steps: The most.

    """

    def __init__(self, steps: int = STEPS) -> None:
        self.left = steps

    def __repr__(self) -> str:
        return f"<Budget [{self.left} steps left]>"


def is_binary(content: bytes) -> bool:
    """Whether it is no text."""
    return b"\0" in content[:TEXT_WITHIN]


def patch(path: bytes, old: Side | None, new: Side | None, budget: Budget) -> Iterator[bytes]:
    """
    Yield the parts of the patch for one path.

    Args:
        path: Relative to where the patch will be applied.
        old: What it was; ``None`` if there was nothing.
        new: What it is; ``None`` if there is nothing.
        budget: What may be spent.

    """
    assert old is not None or new is not None
    before, after = _quoted(b"a/" + path), _quoted(b"b/" + path)
    yield b"diff --git %s %s\n" % (before, after)
    if old is None and new is not None:
        yield b"new file mode %06o\n" % new.mode
    elif new is None and old is not None:
        yield b"deleted file mode %06o\n" % old.mode
    elif old is not None and new is not None and old.mode != new.mode:
        yield b"old mode %06o\nnew mode %06o\n" % (old.mode, new.mode)
    a, b = b"" if old is None else old.content, b"" if new is None else new.content
    if old is not None and new is not None and a == b:
        return
    same = b" %06o" % new.mode if old is not None and new is not None and old.mode == new.mode else b""
    yield b"index %s..%s%s\n" % (_name(old), _name(new), same)
    if is_binary(a) or is_binary(b):
        yield b"GIT binary patch\n"
        yield from _literal(b)
        return
    if a == b:
        return  # an empty file that comes or goes
    yield b"--- %s\n" % (b"/dev/null" if old is None else _ended(before))
    yield b"+++ %s\n" % (b"/dev/null" if new is None else _ended(after))
    yield from _hunks(a, b, budget)


def _name(side: Side | None) -> bytes:
    """Return git's name for the contents, without which it applies no binary patch."""
    if side is None:
        return b"0" * 40
    head = b"blob %d\0" % len(side.content)
    return hashlib.sha1(head + side.content, usedforsecurity=False).hexdigest().encode()


def _quoted(name: bytes) -> bytes:
    if all(32 <= byte < 127 and byte not in _ESCAPES for byte in name):
        return name
    return b'"%s"' % b"".join(
        _ESCAPES.get(byte) or (b"%c" % byte if 32 <= byte < 127 else b"\\%03o" % byte) for byte in name
    )


def _ended(name: bytes) -> bytes:
    """Mark the end of a name that holds a space, as git does."""
    return name + b"\t" if b" " in name else name


def _literal(content: bytes) -> Iterator[bytes]:
    packed = zlib.compress(content, 6)
    yield b"literal %d\n" % len(content)
    for at in range(0, len(packed), 52):
        part = packed[at : at + 52]
        length = len(part)
        letter = b"%c" % (length + 64 if length <= 26 else length + 70)
        yield letter + base64.b85encode(part, pad=True) + b"\n"
    yield b"\n"


def _hunks(a: bytes, b: bytes, budget: Budget) -> Iterator[bytes]:
    old, new = _lines(a), _lines(b)
    for group in _groups(_regions(old, new, budget)):
        begin = max(group[0][0] - CONTEXT, 0)
        shift = group[0][2] - group[0][0]
        end = min(group[-1][1] + CONTEXT, len(old))
        last = end + group[-1][3] - group[-1][1]
        yield b"@@ -%s +%s @@\n" % (_span(begin, end), _span(begin + shift, last))
        at = begin
        for i1, i2, j1, j2 in group:
            yield from _marked(b" ", old[at:i1])
            yield from _marked(b"-", old[i1:i2])
            yield from _marked(b"+", new[j1:j2])
            at = i2
        yield from _marked(b" ", old[at:end])


def _lines(text: bytes) -> list[bytes]:
    lines = text.split(b"\n")
    last = lines.pop()
    lines = [line + b"\n" for line in lines]
    return [*lines, last] if last else lines


def _marked(mark: bytes, lines: Sequence[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield mark + line if line.endswith(b"\n") else mark + line + b"\n" + _NO_NEWLINE


def _span(begin: int, end: int) -> bytes:
    length = end - begin
    if length == 1:
        return b"%d" % (begin + 1)
    return b"%d,%d" % (begin + 1 if length else begin, length)


Region = tuple[int, int, int, int]
"""Lines of the old text, from and up to, that lines of the new text replace."""


def _groups(regions: Sequence[Region]) -> Iterator[list[Region]]:
    group: list[Region] = []
    for region in regions:
        if group and region[0] - group[-1][1] > 2 * CONTEXT:
            yield group
            group = []
        group.append(region)
    if group:
        yield group


def _regions(old: Sequence[bytes], new: Sequence[bytes], budget: Budget) -> list[Region]:
    """Find what differs, with the fewest lines (E. W. Myers, 1986), as long as that is affordable."""
    start, most = 0, min(len(old), len(new))
    while start < most and old[start] == new[start]:
        start += 1
    tail = 0
    while tail < most - start and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[start : len(old) - tail], new[start : len(new) - tail]
    if not a and not b:
        return []
    path = _shortest(a, b, budget) if a and b else None
    if path is None:
        return [(start, start + len(a), start, start + len(b))]
    regions: list[Region] = []
    x = y = 0
    for i, j, length in [*path, (len(a), len(b), 0)]:
        if i > x or j > y:
            regions.append((start + x, start + i, start + y, start + j))
        x, y = i + length, j + length
    return regions


def _shortest(a: Sequence[bytes], b: Sequence[bytes], budget: Budget) -> list[tuple[int, int, int]] | None:
    """Return the runs of lines that both have, as places in both and lengths; ``None`` if it would cost too much."""
    n, m = len(a), len(b)
    most = min(n + m, MOST_EDITS)
    if abs(n - m) > most:
        return None
    furthest = [0] * (2 * most + 3)
    middle = most + 1
    trace: list[list[int]] = []
    for d in range(most + 1):
        budget.left -= d + 1
        if budget.left < 0:
            return None
        trace.append(furthest[middle - d - 1 : middle + d + 2])
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest[middle + k - 1] < furthest[middle + k + 1])
            x = furthest[middle + k + 1] if down else furthest[middle + k - 1] + 1
            y = x - k
            while x < n and y < m and a[x] == b[y]:
                x += 1
                y += 1
            furthest[middle + k] = x
            if x >= n and y >= m:
                return _back(trace, n, m)
    return None


def _back(trace: Sequence[Sequence[int]], x: int, y: int) -> list[tuple[int, int, int]]:
    runs: list[tuple[int, int, int]] = []
    for d in range(len(trace) - 1, -1, -1):
        before, k = trace[d], x - y
        at = d + 1  # where diagonal 0 is
        down = k == -d or (k != d and before[at + k - 1] < before[at + k + 1])
        from_k = k + 1 if down else k - 1
        from_x = before[at + from_k] if d else 0
        from_y = from_x - from_k if d else 0
        turn_x = (from_x if down else from_x + 1) if d else 0
        turn_y = turn_x - k
        if x > turn_x:
            runs.append((turn_x, turn_y, x - turn_x))
        x, y = from_x, from_y
    return runs[::-1]
