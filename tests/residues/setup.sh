set -eu
umask 022
export GIT_AUTHOR_DATE="2024-01-01T00:00:00Z" GIT_COMMITTER_DATE="2024-01-01T00:00:00Z"
cat > ~/.gitconfig <<'G'
[user]
	name = Fixture
	email = fixture@example.org
[init]
	defaultBranch = main
G
echo 'export FROM_BASHRC=1' > ~/.bashrc
mkdir -p -m 700 ~/.ssh
mkdir repo
cd repo
mkdir -p src tests build .venv/bin .venv/lib/site-packages empty readonly
printf 'def answer():\n    return 42\n' > f.py
printf 'def other():\n    return 7_\n' > g.py
printf 'import f\n' > src/main.py
printf 'build/\n*.pyc\n.venv/\n*.so\n' > .gitignore
printf 'object\n' > build/out.o
printf '\177ELF built\n' > ext.so
printf '#!/bin/sh\nexit 0\n' > .venv/bin/python
chmod 755 .venv/bin/python
printf 'VERSION = 1\n' > .venv/lib/site-packages/lib.py
printf 'kept\n' > readonly/kept
chmod 555 readonly
ln -s f.py link.py
printf 'shared\n' > hard1
ln hard1 hard2
if command -v git > /dev/null; then
    git init -q
    git add f.py g.py src .gitignore link.py
    git -c commit.gpgsign=false commit -qm base
fi
printf 'private\n' > secret.txt
chmod 600 secret.txt
python3 - <<'P'
import os
with open(b"name-\xff.txt", "wb") as file:
    file.write(b"latin\n")
with open("sparse.bin", "wb") as file:
    file.truncate(8 << 20)
    file.seek(4 << 20)
    file.write(b"middle")
with open("tagged.txt", "w") as file:
    file.write("tagged\n")
try:
    os.setxattr("tagged.txt", "user.tag", b"baseline")
except OSError:
    pass
os.mkfifo("pipe")
P
