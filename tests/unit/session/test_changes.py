# SPDX-License-Identifier: Apache-2.0
"""What a runner says of files is checked before it is believed: it may be anybody's program by now."""

from __future__ import annotations

import hashlib
import json

import anyio
import pytest

from agentsandbox.errors import ContentTooLarge, StreamBroken
from agentsandbox.session import changes
from agentsandbox.session.changes import Entry, Refused

pytestmark = pytest.mark.anyio

DIRECTORY = ["d", 0o40755, 0, 0, 0, 0, []]
SHA = hashlib.sha256(b"new").hexdigest()
FILE = ["f", 0o100644, 0, 0, 0, 0, [["user.a", "00"]], 3, SHA, "", 1]
DONE = {"verified": True, "reason": "", "scope": ["/w"]}


class Session:
    """A session whose runner answers what a test says, in pieces."""

    def __init__(self, output=b"", report=DONE, piece=7):
        self.output, self.report, self.piece = output, report, piece
        self.asked, self.taken, self.lost = [], b"", None

    def lose(self, error):
        self.lost = error

    async def builtin(self, name, arguments, *, timeout, stdin=None, on_output=None):
        self.asked.append((name, dict(arguments)))
        if isinstance(stdin, bytes):
            self.taken = stdin
        elif stdin is not None:
            async for part in stdin:
                self.taken += part
        for at in range(0, len(self.output), self.piece):
            await anyio.lowlevel.checkpoint()
            result = on_output("stdout", self.output[at : at + self.piece])
            if result is not None:
                await result
        return self.report


def lines(*values):
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


async def compared(session):
    return await changes.changes(session, manifest="m", stamps="s", limit=100, skip=["/x"])


async def test_changes_are_read_with_their_contents():
    """However the bytes arrive, newlines in contents and names that are no text included."""
    output = lines(["/w/caf\udce9", None, FILE, -1, 3]) + b"new"
    output += lines(["/w/f", FILE, FILE, 3, 0]) + b"a\nb" + lines(["/w/d", DIRECTORY, None, -1, -1])
    output += lines({"links": [["/w/a", "/w/b"]]})
    session = Session(output)
    pairs, links, scope = await compared(session)

    assert [("changes", {"manifest": "m", "stamps": "s", "limit": 100, "skip": ["/x"]})] == session.asked
    assert ["/w/caf\udce9", "/w/f", "/w/d"] == [pair.path for pair in pairs]
    assert [(None, b"new"), (b"a\nb", b""), (None, None)] == [(pair.before, pair.after) for pair in pairs]
    assert FILE == pairs[0].new.plain()
    assert DIRECTORY == pairs[2].old.plain()
    assert ([["/w/a", "/w/b"]], ("/w",)) == (links, scope)


@pytest.mark.parametrize(
    "output",
    [
        b"no line",
        b"no JSON\n",
        lines(["relative", None, FILE, -1, -1]),
        lines(["/w/../etc", None, FILE, -1, -1]),
        lines(["/w//x", None, FILE, -1, -1]),
        lines(["/w/\0", None, FILE, -1, -1]),
        lines([7, None, FILE, -1, -1]),
        lines(["/w/f", None, FILE, -1]),
        lines(["/w/f", None, FILE, -1, -1, -1]),
        lines(["/w/f", None, FILE, -1, 30]) + b"new",
        lines(["/w/f", None, FILE, -1, "x"]),
        lines(["/w/f", None, ["f", 0o40755, 0, 0, 0, 0, []], -1, -1]),
        lines(["/w/f", None, ["x", 0o40755, 0, 0, 0, 0, [], 1], -1, -1]) + b"x",
        lines(["/w/f", None, [*FILE[:7], -1, SHA, "", 1], -1, -1]),
        lines(["/w/f", None, [*FILE[:7], 3, "00", "", 1], -1, -1]),
        lines(["/w/f", None, [*FILE[:7], 3, SHA, "", "1"], -1, -1]),
        lines(["/w/f", None, [*FILE[:2], True, *FILE[3:]], -1, -1]),
        lines(["/w/f", None, [*FILE[:6], 7], -1, -1]),
        lines({"nolinks": []}),
        lines("text"),
    ],
    ids=range(20),
)
async def test_nonsense_ends_the_session(output):
    """Nothing of it is believed, and nothing more is asked."""
    session = Session(output)
    with pytest.raises(StreamBroken, match=r"^damaged: what the runner says of its changes is damaged"):
        await compared(session)

    assert isinstance(session.lost, StreamBroken)


async def test_more_than_was_asked_for_ends_the_session(monkeypatch):
    """A runner that does not keep to the limit cannot fill the driver's memory."""
    monkeypatch.setattr("agentsandbox.session.changes._SLACK", 0)
    with pytest.raises(StreamBroken, match="more than was asked for"):
        await compared(Session(b"x" * 101))


async def test_what_is_too_large_is_named():
    """With its size and the limit it is about."""
    report = {"verified": False, "too_large": "/w/huge", "size": 12, "reason": "over"}
    with pytest.raises(ContentTooLarge, match=r"^'/w/huge' with 12 bytes: over$"):
        await compared(Session(report=report))


async def test_what_was_not_done_is_said_with_how_far_it_came():
    """In the words of the runner."""
    for touched in (True, False):
        with pytest.raises(Refused, match=r"^baseline missing$") as raised:
            await compared(Session(report={"verified": False, "reason": "baseline missing", "touched": touched}))
        assert touched is raised.value.touched


async def test_what_was_captured_is_a_tree():
    """Everything is below a root, in a directory."""
    output = lines(
        ["/w", DIRECTORY], ["/w/d", DIRECTORY], ["/w/d/f", FILE], ["/w/p", ["o", 0o10644, 0, 0, 0, 0, [], 5]]
    )
    roots, entries = await changes.capture(Session(output), ["/w", "/w/d"], skip=["/w/s"], kill=True)

    assert (("/w",), ["/w", "/w/d", "/w/d/f", "/w/p"]) == (roots, list(entries))
    assert Entry("o", 0o10644, 0, 0, 0, 0, (), device=5) == entries["/w/p"]


@pytest.mark.parametrize(
    "output",
    [
        lines(["/w", FILE]),
        lines(["/w/d", DIRECTORY]),
        lines(["/w", DIRECTORY], ["/etc", DIRECTORY]),
        lines(["/w", DIRECTORY], ["/w/f", FILE], ["/w/f/g", FILE]),
        lines(["/w", DIRECTORY], ["/w/d/f", FILE]),
    ],
    ids=["a root is a file", "no root", "elsewhere", "in a file", "in nothing"],
)
async def test_what_is_no_tree_ends_the_session(output):
    """It could lead anywhere when it is restored."""
    session = Session(output)
    with pytest.raises(StreamBroken, match="damaged"):
        await changes.capture(session, ["/w"])
    assert session.lost is not None


async def test_contents_are_handed_on_file_by_file():
    """To a thread, with their sizes."""
    session, got = Session(lines(["/w/a", 3]) + b"abc" + lines(["/w/b", 0]) + lines(["/w/c", 1]) + b"\n"), []
    await changes.contents(
        session, ["/w/a", "/w/b", "/w/c"], lambda path, size, file: got.append((path, file.read(size)))
    )

    assert [("/w/a", b"abc"), ("/w/b", b""), ("/w/c", b"\n")] == got
    assert lines("/w/a", "/w/b", "/w/c") == session.taken


async def test_whoever_cannot_take_contents_ends_the_transfer():
    """With the error of its own."""

    def take(path, size, file):
        raise ValueError(path)

    with pytest.raises(ValueError, match="/w/a"):
        await changes.contents(Session(lines(["/w/a", 1 << 20]) + bytes(1 << 20), piece=65536), ["/w/a"], take)


async def test_what_is_installed_is_sent_with_the_contents_that_are_needed():
    """Names first, in order, then contents under their hashes."""
    session = Session(report={**DONE, "changed": 2})
    entries = {"/w": Entry.parse(DIRECTORY), "/w/f": Entry.parse(FILE)}
    done = await changes.install(session, ["/w"], entries, [(SHA, 3)], lambda _digest, put: put(b"new"))

    assert 2 == done
    head = {"scope": ["/w"], "entries": 2, "blobs": 1}
    assert lines(head, ["/w", DIRECTORY], ["/w/f", FILE], [SHA, 3]) + b"new" == session.taken


async def test_contents_that_cannot_be_had_end_the_installation():
    """With the store's error, and the runner sees that it ends early."""

    def write(digest, put):
        raise LookupError(digest)

    with pytest.raises(LookupError, match=SHA):
        await changes.install(Session(), ["/w"], {"/w": Entry.parse(DIRECTORY)}, [(SHA, 3)], write)
