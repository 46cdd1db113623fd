# SPDX-License-Identifier: Apache-2.0
"""Patches that real tools apply, with the same bytes as a result."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentsandbox.client.changes import diff_of
from agentsandbox.client.patches import MOST_EDITS, Budget, Side, patch
from agentsandbox.models.changes import ChangeKind
from agentsandbox.session.changes import Pair

from .trees import GIT, PATCH, ROOT, apply, entry, pairs, read, write

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_patch = pytest.mark.skipif(shutil.which("patch") is None, reason="patch is not installed")


def made(before, after):
    """The diff of two trees."""
    return diff_of(pairs(before, after), [], root=ROOT, scope=[ROOT])


def text(content, mode=0o644):
    return ("f", mode, content)


CASES = {
    "a file is added": ({}, {b"a/b.txt": text(b"one\ntwo\n")}),
    "a file is deleted, and its directory with it": (
        {b"a/b.txt": text(b"one\n"), b"k": text(b"k\n")},
        {b"k": text(b"k\n")},
    ),
    "a line is changed": (
        {b"f": text(b"".join(b"%d\n" % n for n in range(40)))},
        {b"f": text(b"".join(b"%d\n" % n if n != 20 else b"twenty\n" for n in range(40)))},
    ),
    "lines are changed far apart": (
        {b"f": text(b"".join(b"%d\n" % n for n in range(90)))},
        {b"f": text(b"".join(b"%d\n" % n for n in range(90) if n not in (3, 50, 88)))},
    ),
    "the first and the last line change": ({b"f": text(b"a\nb\nc\n")}, {b"f": text(b"A\nb\nC\n")}),
    "the newline at the end goes": ({b"f": text(b"a\nb\n")}, {b"f": text(b"a\nb")}),
    "the newline at the end comes": ({b"f": text(b"a\nb")}, {b"f": text(b"a\nb\n")}),
    "no newline before and after": ({b"f": text(b"a\nb")}, {b"f": text(b"x\nb")}),
    "an empty file comes": ({b"k": text(b"k\n")}, {b"k": text(b"k\n"), b"e": text(b"")}),
    "an empty file goes": ({b"k": text(b"k\n"), b"e": text(b"")}, {b"k": text(b"k\n")}),
    "a file becomes empty": ({b"f": text(b"a\n")}, {b"f": text(b"")}),
    "an empty file is filled": ({b"f": text(b"")}, {b"f": text(b"a\n")}),
    "a file becomes executable": ({b"f": text(b"a\n")}, {b"f": text(b"a\n", 0o755)}),
    "an executable file is changed": ({b"f": text(b"a\n", 0o755)}, {b"f": text(b"b\n", 0o755)}),
    "mode and contents change": ({b"f": text(b"a\n", 0o755)}, {b"f": text(b"b\n")}),
    "carriage returns and odd characters": (
        {b"f": text(b"a\r\n\x01\xff\xfe\n")},
        {b"f": text(b"b\r\n\x01\xff\xfe\n\x0c")},
    ),
}

ODD = {
    "names that are no UTF-8": ({b"caf\xe9": text(b"a\n")}, {b"caf\xe9": text(b"b\n"), b"\xff\xfe/x": text(b"n\n")}),
    "names with spaces, quotes, tabs and newlines": (
        {b"a b": text(b"a\n"), b'q"\\u': text(b"q\n")},
        {b"a b": text(b"b\n"), b"t\tn\n x": text(b"n\n"), b" lead": text(b"l\n")},
    ),
    "a symbolic link comes, changes and goes": (
        {b"l": ("l", 0o777, b"one"), b"m": ("l", 0o777, b"two")},
        {b"m": ("l", 0o777, b"three"), b"n": ("l", 0o777, b"caf\xe9")},
    ),
    "a file becomes a symbolic link": ({b"x": text(b"a\n")}, {b"x": ("l", 0o777, b"y")}),
    "a symbolic link becomes a file": ({b"x": ("l", 0o777, b"y")}, {b"x": text(b"a\n")}),
    "a file becomes a directory": ({b"x": text(b"a\n")}, {b"x/y": text(b"b\n")}),
    "a directory becomes a file": ({b"x/y": text(b"a\n"), b"x/z": text(b"b\n")}, {b"x": text(b"c\n")}),
    "a directory becomes a symbolic link": ({b"x/y": text(b"a\n")}, {b"x": ("l", 0o777, b"z")}),
    "a link to a directory becomes one": (
        {b"d/x": text(b"a\n"), b"l": ("l", 0o777, b"d")},
        {b"d/x": text(b"a\n"), b"l/x": text(b"b\n")},
    ),
    "a binary file comes": ({}, {b"b": text(bytes(range(256)) * 5)}),
    "a binary file goes": ({b"b": text(b"\0\1"), b"k": text(b"k\n")}, {b"k": text(b"k\n")}),
    "a binary file changes": ({b"b": text(bytes(range(256)))}, {b"b": text(bytes(range(255, -1, -1)) * 3, 0o755)}),
    "a text becomes binary and the other way round": (
        {b"a": text(b"text\n"), b"b": text(b"\0\n")},
        {b"a": text(b"\0\n"), b"b": text(b"text\n")},
    ),
}


@needs_git
@pytest.mark.parametrize(("before", "after"), [*CASES.values(), *ODD.values()], ids=[*CASES, *ODD])
def test_git_applies_it_to_a_fresh_copy_with_the_same_result(tmp_path, before, after):
    """Every byte and mode is what it is in the sandbox, and nothing is left unsaid."""
    write(before, tmp_path / "t")
    diff = made(before, after)

    assert None is apply(GIT, diff.patch, tmp_path / "t"), diff.text
    assert after == read(tmp_path / "t")
    assert () == diff.unpatched


@needs_patch
@pytest.mark.parametrize(("before", "after"), CASES.values(), ids=CASES)
def test_patch_applies_it_to_a_fresh_copy_with_the_same_result(tmp_path, before, after):
    """Plain text and ordinary names, which is all that it is made for."""
    write(before, tmp_path / "t")

    assert None is apply(PATCH, made(before, after).patch, tmp_path / "t")
    assert after == read(tmp_path / "t")


NAMES = st.sampled_from([b"a", b"b", b"c d", b"\xe9", b"e\n"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
LINES = st.lists(st.sampled_from([b"x\n", b"y\n", b"z\n", b"\r\n", b"\n"]), max_size=12).map(b"".join)
CONTENTS = st.one_of(
    LINES, st.tuples(LINES, st.sampled_from([b"end", b"\0", b"\xff"])).map(b"".join), st.binary(max_size=90)
)
FILES = st.tuples(st.just("f"), st.sampled_from([0o644, 0o755]), CONTENTS)
# None of them leads to itself: git cannot look below such a link, to which it has to put a directory.
LINKS = st.tuples(st.just("l"), st.just(0o777), st.sampled_from([b"nowhere", b"../gone/x", b"\xe9x"]))


@st.composite
def trees(draw):
    """A tree in which no file is in the way of another one."""
    tree = {}
    for path, node in draw(st.dictionaries(PATHS, st.one_of(FILES, FILES, LINKS), max_size=6)).items():
        if not any(other.startswith(path + b"/") or path.startswith(other + b"/") for other in tree):
            tree[path] = node
    return tree


@needs_git
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=trees(), after=trees())
def test_whatever_changes_git_makes_the_same_of_it(before, after):
    """A round trip: two trees, the patch between them, and a copy of the first one becomes the second one."""
    diff = made(before, after)
    with tempfile.TemporaryDirectory() as top:
        copy = Path(top) / "t"
        write(before, copy)
        if diff.patch:
            assert None is apply(GIT, diff.patch, copy), diff.text
        assert after == read(copy)


@given(before=trees(), after=trees())
def test_the_same_changes_give_the_same_patch_in_whatever_order_they_are_told(before, after):
    """Deterministic."""
    found = pairs(before, after)
    first = diff_of(found, [], root=ROOT, scope=[ROOT])

    assert first == diff_of(found[::-1], [], root=ROOT, scope=[ROOT])
    assert [os.fsencode(change.path) for change in first.changes] == sorted(os.fsencode(p.path) for p in found)


@given(
    st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n"]), max_size=30),
    st.lists(st.sampled_from([b"a\n", b"b\n"]), max_size=30),
)
def test_a_patch_has_the_fewest_lines(old, new):
    """As many deletions and insertions as the longest common subsequence leaves."""
    lengths = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for i, left in enumerate(old):
        for j, right in enumerate(new):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if left == right else max(lengths[i][j + 1], lengths[i + 1][j])
    common = lengths[-1][-1]
    lines = b"".join(patch(b"f", Side(0o100644, b"".join(old)), Side(0o100644, b"".join(new)), Budget())).split(b"\n")

    body = lines[4:]
    assert len(old) - common == sum(line.startswith(b"-") for line in body)
    assert len(new) - common == sum(line.startswith(b"+") for line in body)


@needs_git
def test_texts_that_are_different_altogether_are_replaced_and_cost_no_more(tmp_path):
    """Finding the fewest lines takes time with the square of the edits: beyond a thousand nobody tries."""
    before = {b"f": text(b"same\n" + b"".join(b"a%d\n" % n for n in range(5 * MOST_EDITS)) + b"end\n")}
    after = {b"f": text(b"same\n" + b"".join(b"b%d\n" % n for n in range(5 * MOST_EDITS)) + b"end\n")}
    budget = Budget()
    list(patch(b"f", Side(0o100644, before[b"f"][2]), Side(0o100644, after[b"f"][2]), budget))
    write(before, tmp_path / "t")

    assert "<Budget [4498499 steps left]>" == repr(budget)
    assert None is apply(GIT, made(before, after).patch, tmp_path / "t")
    assert after == read(tmp_path / "t")


def test_when_the_budget_is_spent_texts_are_replaced_as_a_whole():
    """What comes last costs nothing any more."""
    old, new = Side(0o100644, b"a\nb\nc\n"), Side(0o100644, b"b\nx\nc\n")

    assert b"@@ -1,3 +1,3 @@\n-a\n b\n+x\n c\n" in b"".join(patch(b"f", old, new, Budget()))
    assert b"@@ -1,3 +1,3 @@\n-a\n-b\n+b\n+x\n c\n" in b"".join(patch(b"f", old, new, Budget(0)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, entry("d", stat.S_IFDIR | 0o755)),
        (entry("d", stat.S_IFDIR | 0o755), None),
        (entry("d", stat.S_IFDIR | 0o755), entry("d", stat.S_IFDIR | 0o700)),
        (None, entry("o", stat.S_IFIFO | 0o644)),
        (None, entry("o", stat.S_IFSOCK | 0o644)),
        (None, entry("f", stat.S_IFREG | 0o600)),
        (entry("f", stat.S_IFREG | 0o644), entry("f", stat.S_IFREG | 0o666)),
        (entry("f", stat.S_IFREG | 0o644), entry("f", stat.S_IFREG | 0o644, uid=7)),
        (entry("f", stat.S_IFREG | 0o644), entry("f", stat.S_IFREG | 0o644, attributes=(("user.a", "00"),))),
        (None, entry("f", stat.S_IFREG | 0o644, flags=16)),
        (entry("f", stat.S_IFREG | 0o644), entry("f", stat.S_IFREG | 0o644, links=2)),
    ],
    ids=[
        "an empty directory comes",
        "an empty directory goes",
        "a directory's mode",
        "a FIFO",
        "a socket",
        "a private file",
        "a mode that git does not know",
        "an owner",
        "an extended attribute",
        "a flag",
        "a hard link elsewhere",
    ],
)
def test_what_no_patch_can_say_is_in_the_list_and_marked(old, new):
    """So that nobody takes the patch for all there is."""
    diff = diff_of([Pair("/w/x", old, new, None, None)], [], root="/w", scope=["/w"])

    (change,) = diff.unpatched
    assert "/w/x" == change.path


def test_hard_links_are_named_with_each_other():
    """Each of the names says which others lead to the same file."""
    file = entry("f", stat.S_IFREG | 0o644, b"x", links=2)
    diff = diff_of(
        [Pair(f"/w/{name}", None, file, None, b"x") for name in "ab"], [["/w/a", "/w/b"]], root="/w", scope=["/w"]
    )

    assert [("/w/b",), ("/w/a",)] == [change.links for change in diff.changes]
    assert [False, False] == [change.patched for change in diff.changes]


def test_the_inside_of_git_is_listed_and_not_patched():
    """Git refuses a patch that touches its own files, all of it."""
    after = {b".git/index": text(b"x"), b"sub/.GIT/config": text(b"y"), b"f": text(b"z\n"), b".gitignore": text(b"q\n")}
    diff = made({}, after)

    assert b".git/" not in diff.patch
    assert b".GIT/" not in diff.patch
    assert b"b/.gitignore" in diff.patch
    assert {"/w/.git", "/w/.git/index", "/w/sub", "/w/sub/.GIT", "/w/sub/.GIT/config"} == {
        c.path for c in diff.unpatched
    }


def test_what_is_elsewhere_is_listed_and_not_patched():
    """The patch is about one directory."""
    found = [Pair(path, None, entry("f", stat.S_IFREG | 0o644, b"x"), None, b"x") for path in ("/tmp/t", "/w/f", "/wx")]
    diff = diff_of(found, [], root="/w", scope=["/tmp", "/w"])

    assert ["/tmp/t", "/w/f", "/wx"] == [change.path for change in diff.changes]
    assert ["/tmp/t", "/wx"] == [change.path for change in diff.unpatched]
    assert 1 == diff.patch.count(b"diff --git")
    assert b"a/tmp/t" in diff_of(found, [], root="/", scope=["/"]).patch


def test_a_change_says_what_was_and_what_is():
    """Types, modes, owners, sizes and targets, before and after."""
    old = entry("f", stat.S_IFREG | 0o644, b"\0old", uid=1, gid=2)
    new = entry("l", stat.S_IFLNK | 0o777, b"there")
    (change,) = diff_of([Pair("/w/x", old, new, b"\0old", None)], [], root="/w", scope=["/w"]).changes

    assert ChangeKind.MODIFIED == change.kind
    assert ("file", "symlink") == (change.old_type, change.type)
    assert (0o644, 0o777) == (change.old_mode, change.mode)
    assert ((1, 2), (0, 0)) == (change.old_owner, change.owner)
    assert (4, None) == (change.old_size, change.size)
    assert (None, "there") == (change.old_target, change.target)
    assert change.binary is True


def test_an_empty_diff_is_false_and_has_no_patch():
    """Nothing changed."""
    diff = diff_of([], [], root="/w", scope=["/w"])

    assert not diff
    assert (b"", "") == (diff.patch, diff.text)
    assert attrs.evolve(diff, patch=b"\xff").text.encode("utf-8", "surrogateescape") == b"\xff"
