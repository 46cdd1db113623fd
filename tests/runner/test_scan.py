# SPDX-License-Identifier: Apache-2.0
"""Manifests, and trees that become again what they say, under every Python."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from agentsandbox.protocol import bootstrap

PROGRAM = """
import json, mmap, os, sys
from agentsandbox.protocol.runner import hashing, restore, scan, storing
import shutil
root, user, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
open(os.devnull, "w").close()  # the change to be made may need the codec of text files
if user:
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
sys.setrecursionlimit(5000)

class Forbidden:  # what is imported now would come from files that an episode may have written
    def find_spec(self, name, path=None, target=None):
        raise SystemExit("imports " + name)

sys.meta_path.insert(0, Forbidden())
mute = scan.silent_devices([root])
fd = os.open(root + "/..", os.O_TMPFILE | os.O_RDWR, 0o600)
scanner = scan.Scanner(mute, storing.Store(fd, limit))
tree, stamps = scan.take(scanner, [root])
scanner.store.flush()
scan.tick(scanner.newest)
os.chdir(root)
forbidden = sys.meta_path.pop(0)
exec(sys.argv[4])
sys.meta_path.insert(0, forbidden)
os.chdir("/")
answer = {}
for turn in range(2):
    restorer = restore.Restorer(scan.Scanner(mute), tree, stamps, fd)
    try:
        restorer.run()
        stamps = restorer.stamps
        reason = ""
    except (scan.Unverifiable, OSError) as error:
        reason = str(error)
    names = {name.encode("utf-8", "surrogateescape").decode("latin-1") for name in restorer.changed}
    answer[turn] = [sorted(names), reason]
cut = lambda t: {d: {n: e[:9] for n, e in names.items()} for d, names in t.items()}
try:
    again, _ = scan.take(scan.Scanner(mute), [root])
    answer["same"] = cut(again) == cut(tree)
except OSError:
    answer["same"] = False
print(json.dumps(answer))
"""

ORDINARY = 65534


class Outcome:
    """What the program said, with paths relative to the tree."""

    def __init__(self, root: Path, answer: dict) -> None:
        self.changed = sorted(name.replace(f"{root}/", "") for name in answer["0"][0])
        self.reason = answer["0"][1].replace(f"{root}/", "")
        self.again = answer["1"]
        self.same = answer["same"]


def restored(python: str, root: Path, change: str, *, user: int = 0, limit: int = 1 << 28) -> Outcome:
    """Take a baseline, change something, restore twice."""
    text = bootstrap.source().decode() + PROGRAM
    arguments = [python, "-I", "-S", "-B", "-", str(root), str(user), str(limit), change]
    result = subprocess.run(arguments, input=text.encode(), capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    return Outcome(root, json.loads(result.stdout))


@pytest.fixture(params=["root", "ordinary"])
def user(request):
    """Root may do everything; an ordinary user has to open closed directories first."""
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("needs root")
    return 0 if request.param == "root" or os.geteuid() != 0 else ORDINARY


@pytest.fixture
def root(user):
    """A tree with one of everything."""
    # Not below pytest's own directory, where other users may not go.
    with tempfile.TemporaryDirectory(prefix="scan-") as top:
        root = Path(top) / "tree"
        (root / "src").mkdir(parents=True)
        (root / "f.py").write_text("answer = 42\n")
        (root / "src/main.py").write_text("import f\n")
        (root / "closed").mkdir()
        (root / "closed/kept").write_text("kept\n")
        (root / "empty").mkdir()
        (root / "one").write_text("shared\n")
        os.link(root / "one", root / "two")
        os.symlink("f.py", root / "link")
        os.mkfifo(root / "pipe")
        (root / "large").write_bytes(bytes(range(256)) * 8192)
        with open(root / "holes", "wb") as file:
            file.truncate(4 << 20)
            file.seek(3 << 20)
            file.write(b"x")
        with open(os.fsencode(root) + b"/\xff\n", "wb") as file:
            file.write(b"bytes")
        (root / "closed").chmod(0o555)
        if user:
            for path in [root.parent, root, *root.rglob("*")]:
                os.chown(path, user, user, follow_symlinks=False)
        yield root


CHANGES = {
    "nothing": ("pass", []),
    "content": ("open('f.py', 'w').write('answer = 41\\n')", ["f.py"]),
    "same-times": (
        "s = os.stat('f.py'); open('f.py', 'r+').write('A'); os.utime('f.py', ns=(s.st_atime_ns, s.st_mtime_ns))",
        ["f.py"],
    ),
    "memory-map": ("f = open('f.py', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0]; m[0:1] = b'M'; m.close()", ["f.py"]),
    "added": ("os.makedirs('a/b'); open('a/b/c', 'w').close()", ["a"]),
    "deleted": ("os.unlink('f.py'); os.unlink('src/main.py'); os.rmdir('src')", ["f.py", "src", "src/main.py"]),
    "file-for-directory": ("os.unlink('f.py'); os.mkdir('f.py')", ["f.py"]),
    "directory-for-link": ("os.rename('src', 'x'); os.symlink('/etc', 'src')", ["src", "src/main.py", "x"]),
    "link": ("os.unlink('link'); os.symlink('/etc/passwd', 'link')", ["link"]),
    "hard-links": ("os.unlink('two'); open('two', 'w').write('shared\\n')", ["one", "two"]),
    "pipe": ("os.unlink('pipe'); open('pipe', 'w').close()", ["pipe"]),
    "large": ("f = open('large', 'r+b'); f.seek(1500000); f.write(b'!'); f.close()", ["large"]),
    "holes": ("f = open('holes', 'r+b'); f.write(b'!'); f.close()", ["holes"]),
    "bytes": ("open(b'\\xff\\n', 'w').write('other')", ["\xff\n"]),
    "modes": ("os.chmod('f.py', 0); os.chmod('src', 0); os.chmod('closed', 0o777)", ["closed", "f.py", "src"]),
    "in-closed": (
        "os.chmod('closed', 0o755); os.unlink('closed/kept'); os.chmod('closed', 0)",
        ["closed", "closed/kept"],
    ),
    "times": ("os.utime('f.py', (0, 0)); os.utime('src', (0, 0))", ["f.py"]),
    "deep": ("\nfor _ in range(700):\n    os.mkdir('dir'); os.chdir('dir')", ["dir"]),
    "everything": (
        """os.chmod('closed', 0o755)
for n in os.listdir(b'.'):
    shutil.rmtree(n) if os.path.isdir(n) and not os.path.islink(n) else os.unlink(n)""",
        [
            *("f.py", "src", "src/main.py", "closed", "closed/kept", "empty", "one", "two", "link", "pipe", "large"),
            *("holes", "\xff\n"),
        ],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tree_becomes_what_it_was(python, root, user, change):
    """What differs is put back and named, and a second look finds nothing."""
    action, expected = CHANGES[change]
    blocks = (root / "holes").stat().st_blocks

    outcome = restored(python, root, action, user=user)

    assert (sorted(expected), "", [[], ""], True) == (outcome.changed, outcome.reason, outcome.again, outcome.same)
    assert blocks >= (root / "holes").stat().st_blocks
    assert (root / "one").stat().st_ino == (root / "two").stat().st_ino


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("os.pwrite(fd, b'?' * 4096, 0); open('f.py', 'w').close()", "is damaged"),
        ("os.link('one', '../three'); os.unlink('one')", ""),
        ("os.rename('../tree', '../moved'); os.symlink('moved', '../tree')", "tree: "),
    ],
    ids=["damaged-copies", "another-name", "root-is-a-link"],
)
def test_what_cannot_be_shown_is_not_called_clean(python, root, user, action, reason):
    """A copy that is not what it was, or a root that is a link, fail the reset; a name elsewhere loses its file."""
    outcome = restored(python, root, action, user=user)

    if reason:
        assert reason in outcome.reason
    else:
        assert ("", True) == (outcome.reason, outcome.same)
        assert (root / "one").stat().st_ino != (root.parent / "three").stat().st_ino


def test_what_was_too_large_to_keep_is_compared_all_the_same(python, root, user):
    """Without a copy the change is found, and cannot be undone."""
    assert "" == restored(python, root, "pass", user=user, limit=1024).reason
    outcome = restored(python, root, "open('large', 'a').write('x')", user=user, limit=1024)

    assert "large is too large: no copy of it was kept" == outcome.reason


@pytest.mark.parametrize("sabotage", ["", "hashing._different = None; "], ids=["helped", "helper-fails"])
def test_many_files_are_read_by_two_processes(python, sabotage):
    """Changes that only contents tell of are found in every directory, also if the second process fails."""
    with tempfile.TemporaryDirectory(prefix="scan-", dir="/dev/shm") as top:
        root = Path(top) / "tree"
        for number in range(6):
            (root / f"d{number}").mkdir(parents=True)
            for name in range(400):
                (root / f"d{number}/f{name}").write_text(f"{number} {name}")
        change = f"""
{sabotage}assert len(mute) == 1
os.sched_getaffinity = lambda _: {{0, 1}}
for number in range(6):
    f = open("d%d/f7" % number, "r+b"); m = mmap.mmap(f.fileno(), 0); m[0]; m[0:1] = b"x"; m.close()
"""
        outcome = restored(python, root, change)

        assert [f"d{number}/f7" for number in range(6)] == outcome.changed
        assert ("", [[], ""], True) == (outcome.reason, outcome.again, outcome.same)


def test_only_the_first_process_of_a_namespace_resets(make_driver):
    """Anywhere else a reset would end processes of other people: it is refused, and so is a baseline."""
    with make_driver() as driver:
        arguments = {"path": "", "scope": [], "exclude": [], "copies": 1024}
        taken = driver.run(builtin="baseline", args=arguments).exit["report"]
        reset = driver.run(builtin="reset", args={"path": "", "manifest": "0" * 64, "stamps": "0" * 64}).exit["report"]

    reason = "the runner is not the first process of a namespace"
    assert (False, reason, False, reason) == (taken["verified"], taken["reason"], reset["verified"], reset["reason"])
