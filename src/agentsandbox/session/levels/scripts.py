# SPDX-License-Identifier: Apache-2.0
"""
What runs inside a sandbox that has a POSIX shell and no Python.

Nothing but ``sh`` and a few small programs is assumed, and no option of those beyond what BusyBox has. Every name of ours
begins with ``_a``, so that none of it is one of the image's variables.

The program serves requests, one at a time: a line with a random word, lines of code, the same word again. The answer on
standard output is whatever the code writes, and a line with the word and one line of result. What happens to commands
meanwhile is told on standard error, in single lines that begin with the session's key, and for whoever comes too late also
in files of a private directory. Output of commands is in files there, too: none of it is ever between those lines.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

__all__ = ["BOOT", "FUNCTIONS", "LAUNCH", "PLACES", "PROGRAM", "exports", "quote"]

BOOT = '_al=;_ac=;while IFS= read -r _al&&[ "$_al" != . ];do _ac="$_ac$_al\n";done;eval "$_ac"'
"""Runs the code on its standard input up to a line with a dot; ``read`` takes no byte beyond it."""

PLACES = ("/var/tmp", "/tmp", "/run", "/dev/shm")  # noqa: S108
"""Where the private directory may be; then the home and the working directory."""

LAUNCH = 'shopt -s execfail 2>/dev/null;trap "printf %s \\$? >\\"\\$0\\"" EXIT;exec "$@"'
"""Becomes the program that its arguments name, or writes why not into the file ``$0``."""

# How a command is started. What the shell puts into the background with "&" ignores SIGINT and SIGQUIT, and so does all
# that it starts. So the loop starts a pipeline in the foreground, whose last member ends the process that waits for it:
# the first one goes on by itself, with the signals as they were.
FUNCTIONS = r"""
exec 7>&2
_at(){ printf '%s\n' "$_ak $*" >&7;}
_aid(){ read -r _ai _ </proc/self/stat;}
_anow(){ read -r _ac _ </proc/uptime;_ac=$((${_ac%.*}*100+1${_ac#*.}-100));}
_afail(){ { printf '%s .\n' "F $_an $1" >"$_aS/$_an.exit";} 2>/dev/null;_at F "$_an" "$1";exit;}
_aspawn(){
if [ "$3" = live ];then ( _afeed "$1"|_awork "$@"|_adrop );else ( _awork "$@"|_adrop );fi
_ar=sent
}
_adrop(){ read -r _ _ _ _ap _ </proc/self/stat;[ "$_ap" = 1 ]||[ "$_ap" = "$_aloop" ]||kill -9 "$_ap";}
_awork(){
[ "$3" = live ]||exec </dev/null
exec >/dev/null
trap '' PIPE
_an=$1;_atoken=$2;_amode=$3;_amerge=$4;_auname=$5
set -C
{ printf '' >"$_aS/$_an.claim";} 2>/dev/null||{ [ -e "$_aS/$_an.claim" ]||_at F "$_an" no_state;exit;}
set +C
{ printf '' >"$_aS/$_an.out"&&printf '' >"$_aS/$_an.err";} 2>/dev/null||_afail full
if [ "$_amerge" = 1 ];then _amain 2>&1|_acat out
else { _amain|_acat out;} 2>&1|_acat err;fi
[ -s "$_aS/$_an.rc" ]&&[ ! -s "$_aS/$_an.exit" ]||exit
_aend
}
_amain(){
_aid
{ printf '%s\n' "$_ai" >"$_aS/$_an.watch";} 2>/dev/null||_afail full
[ "$_amode" != file ]||[ -r "$_aS/$_an.in" ]||_afail no_state
_apre=$_asetsid
[ -z "$_auname" ]||_auser "$_auname"
cd "$_acwd" 2>/dev/null||_afail no_cwd
_anow
_abegan=$_ac
(
trap - PIPE
umask 022
_aid
_aenv
if [ "$_aprog" ];then _alook "$_aprog";[ -z "$_aw" ]||{ printf '%s' "$_aw" >"$_aS/$_an.fail";exit 127;};fi
{ printf '%s\n' "$_ai" >"$_aS/$_an.pid";} 2>/dev/null
_at S "$_an" "$_ai"
export AGENTSANDBOX_MARK="$_atoken"
[ "$_amode" != file ]||exec <"$_aS/$_an.in"
exec 7>&-
_ago
)
_arc=$?
_anow
_awall=$((_ac-_abegan))
exec 2>/dev/null
if [ -s "$_aS/$_an.fail" ];then read -r _aw <"$_aS/$_an.fail"||:;_afail "$_aw";fi
read -r _al </proc/self/stat
set -- ${_al##*) }
_acpu=$((${14}+${15}))
{ read -r _apid <"$_aS/$_an.pid";} 2>/dev/null||_apid=
_afamily "$_atoken" "$_apid" ''
if printf '%s\n' "$_arc $_awall $_acpu" >"$_aS/$_an.rc"&&[ "$_af" = ' ' ];then exit;fi
exec >/dev/null
sleep "$_adrain"
_ax "$_arc" "$_awall" "$_acpu" $_af
}
_acat(){
exec 2>/dev/null 7>&-
cat >>"$_aS/$_an.$1"||{ printf '' >"$_aS/$_an.cut";cat >/dev/null;}
}
_aend(){
{ read -r _arc <"$_aS/$_an.rc"&&read -r _apid <"$_aS/$_an.pid";} 2>/dev/null||exit
_afamily "$_atoken" "$_apid" ''
_ax $_arc $_af
}
_asize(){
_ar='?'
if [ -s "$1" ];then _ar=$(wc -c <"$1");elif [ -e "$1" ];then _ar=0;fi
}
_ax(){
_ab="$1 $2 $3"
shift 3
_asize "$_aS/$_an.out";_ab="$_ab "$_ar
_asize "$_aS/$_an.err";_ab="$_ab "$_ar
[ -e "$_aS/$_an.cut" ]&&_ab="$_ab 1"||_ab="$_ab 0"
set -- X "$_an" $_ab "$@"
{ printf '%s .\n' "$*" >"$_aS/$_an.exit";} 2>/dev/null
_at "$@"
[ "$_amode" != live ]||{ { read -r _ap <"$_aS/$_an.feeder"&&kill "$_ap";} 2>/dev/null;}
exit
}
_afeed(){
_aid
{ printf '%s\n' "$_ai" >"$_aS/$1.feeder";} 2>/dev/null
_ab=0
while [ -d "$_aS" ];do
if [ -e "$_aS/$1.in.$_ab" ];then
cat "$_aS/$1.in.$_ab" 2>/dev/null||break
rm -f "$_aS/$1.in.$_ab"
_ab=$((_ab+1))
elif [ -e "$_aS/$1.in.$_ab.end" ];then break
else sleep "$_anap";fi
done
{ printf '' >"$_aS/$1.fed";} 2>/dev/null
}
_alook(){
case $1 in
*/*)
if [ -d "$1" ];then _aw=not_executable;elif [ -x "$1" ];then _aw=
elif [ -e "$1" ];then _aw=not_executable;else _awhy "$1";[ "$_aw" = EACCES ]&&_aw=not_executable||_aw=not_found;fi
return;;
esac
_aw=not_found
IFS=:
set -f
for _ad in $PATH;do
[ -f "${_ad:-.}/$1" ]||continue
_aw=not_executable
[ ! -x "${_ad:-.}/$1" ]||{ _aw=;break;}
done
set +f
unset IFS
[ -z "$_aw" ]||[ -z "$1" ]||! command -v "$1" >/dev/null 2>&1||_aw=
}
_awhy(){
_ap=$1
_aw=ENOENT
while :;do
case $_ap in */*)_ap=${_ap%/*};;*)_ap=.;;esac
[ "$_ap" ]||_ap=/
if [ -d "$_ap" ];then [ -x "$_ap" ]||_aw=EACCES;return;fi
if [ -e "$_ap" ];then _aw=ENOTDIR;return;fi
case $_ap in .|/)return;;esac
done
}
_auser(){
_au=
{ while IFS=: read -r _am _ _ad _ag _ _ah _||[ "$_am" ];do
if [ "$_am" = "$1" ]||[ "$_ad" = "$1" ];then _au=$_ad;break;fi
_am=
done </etc/passwd;} 2>/dev/null
if [ -z "$_au" ];then
case $1 in *[!0-9]*)_afail no_user;;esac
_au=$1;_ag=0;_ah=/;_am=
fi
if [ "$_au" != "$_auid" ];then
case $_aswitch in
setpriv)_apre="$_apre $_aswitchp --reuid=$_au --regid=$_ag";[ "$_am" ]&&_apre="$_apre --init-groups"||_apre="$_apre --clear-groups";;
chroot)_apre="$_apre $_aswitchp --skip-chdir --userspec=$_au:$_ag /";;
setuidgid)[ "$_am" ]||_afail no_users;_apre="$_apre $_aswitchp $_am";;
*)_afail no_users;;
esac
fi
export HOME="${_ah:-/}" USER="${_am:-$_au}" LOGNAME="${_am:-$_au}"
}
_afamily(){
_af=' ';_apairs=;_amarked=' ';_a1=$1;_a2=$2;_a3=$3
if [ "$_agrep" ];then
for _ad in $("$_agrep" -lsF "$_a1" /proc/[0-9]*/environ 2>/dev/null);do
_ad=${_ad#/proc/};_amarked="$_amarked${_ad%/environ} "
done
fi
for _ad in /proc/[0-9]*;do
{ read -r _al <"$_ad/stat";} 2>/dev/null||continue
_ap=${_al%% *}
set -- ${_al##*) }
case $1 in Z|X)continue;;esac
_apairs="$_apairs $_ap:$2"
if [ "$_ap" = "$_a2" ]||[ "$4" = "$_a2" ]||[ "$2" = "$_a3" ];then _af="$_af$_ap ";continue;fi
if [ "$_agrep" ];then case $_amarked in *" $_ap "*)_af="$_af$_ap ";;esac
elif _amark "$_ad/environ";then _af="$_af$_ap ";fi
done
while :;do
_ag=
for _ad in $_apairs;do
case $_af in *" ${_ad%:*} "*)continue;;esac
case $_af in *" ${_ad#*:} "*)_af="$_af${_ad%:*} ";_ag=1;;esac
done
[ "$_ag" ]||return
done
}
_amark(){
{ while IFS= read -r _al||[ "$_al" ];do case $_al in *"$_a1"*)return 0;;esac;_al=;done <"$1";} 2>/dev/null
return 1
}
_astop(){
_an=$1
set -C
if { printf '' >"$_aS/$_an.claim";} 2>/dev/null;then set +C;_afail killed;fi
set +C
_anow
_aterm=$((_ac+$3));_alast=$((_ac+$3+$4));_asent=
while :;do
_apid=$5;_aa=
{ read -r _aa <"$_aS/$_an.watch";} 2>/dev/null
[ "$_apid" ]||{ read -r _apid <"$_aS/$_an.pid";} 2>/dev/null
_anow
if [ "$_apid" ];then _afamily "$2" "$_apid" '';else _afamily "$2" '' "$_aa";fi
if [ "$_af" = ' ' ];then
[ -z "$_apid" ]&&[ "$_aa" ]&&[ -d "/proc/$_aa" ]&&[ ! -e "$_aS/$_an.exit" ]&&[ "$_ac" -lt "$_alast" ]||break
elif [ "$_ac" -ge "$_aterm" ];then
kill -9 $_af 2>/dev/null
[ "$_ac" -lt "$_alast" ]||break
elif [ -z "$_asent" ];then kill -15 $_af 2>/dev/null;_asent=1
fi
sleep "$_anap"
done
_at K "$_an" $_af
}
_afind(){
_an=$1;_ar=none;_aa=;_apid=
[ -e "$_aS/$_an.claim" ]||return 0
{ read -r _aa <"$_aS/$_an.watch";} 2>/dev/null
{ read -r _apid <"$_aS/$_an.pid";} 2>/dev/null
_aw=gone
if [ -z "$_aa" ]||[ -d "/proc/$_aa" ];then _aw="run $_apid";fi
[ ! -s "$_aS/$_an.rc" ]||_aw=ended
if { read -r _al <"$_aS/$_an.exit";} 2>/dev/null;then case $_al in *' .')_ar=${_al% .};return 0;;esac;fi
_ar=$_aw
}
_aget(){ dd if="$_aS/$1" bs=4096 skip="$2" count="$3" 2>/dev/null;_ar=$?;}
_aput(){
_ar=
{ dd bs="$2" count=1 iflag=fullblock 2>/dev/null;_ar=$?;} 2>/dev/null >"$1"
if [ "$_ar" ];then [ "$_ar" -lt 126 ]||exit 4
else dd bs="$2" count=1 iflag=fullblock >/dev/null 2>&1||exit 4;_ar=1;fi
}
_atry(){ command -v "$1" >/dev/null 2>&1;}
_atools(){
umask 077
_aid
_aloop=$_ai;_asetsid=;_agrep=;_aw=;_aswitch=;_anap=1;_adrain=1;_auid=
! _atry setsid||_asetsid=$(command -v setsid)
! _atry grep||_agrep=$(command -v grep)
_aenvp=$(command -v env)
_ash=$(command -v "$_ash")
if sleep 0.01 2>/dev/null;then _anap=0.02;_adrain=0.1;fi
{ while read -r _al _ap _;do [ "$_al" != Uid: ]||_auid=$_ap;done </proc/self/status;} 2>/dev/null
[ "$_auid" != 0 ]||for _ad in setpriv chroot setuidgid;do
_atry "$_ad"||continue
case $_ad in
setpriv)setpriv --reuid=65534 --regid=65534 --clear-groups "$_ash" -c : 2>/dev/null;;
chroot)chroot --skip-chdir --userspec=65534:65534 / "$_ash" -c : 2>/dev/null;;
*)setuidgid "$(_aname)" "$_ash" -c : 2>/dev/null;;
esac&&{ _aswitch=$_ad;_aswitchp=$(command -v "$_ad");break;}
done
_aexact=
[ "$(printf abcdef|{ dd bs=4 count=1 iflag=fullblock 2>/dev/null;cat;})" != abcdef ]||
[ "$(printf abcdef|{ dd bs=4 count=1 iflag=fullblock >/dev/null 2>&1;cat;})" != ef ]||_aexact=1
}
_aname(){ while IFS=: read -r _am _ _ap _;do [ "$_ap" = 0 ]||{ printf %s "$_am";return;};done </etc/passwd;}
_ame(){
read -r _al </proc/self/stat
set -- ${_al##*) }
{ printf '%s\n' "$_aloop ${20}" >"$_aS/loop";} 2>/dev/null
}
_ainit(){
_atools
_aS=
for _ad in "$@" "$HOME" "$PWD";do
[ -d "$_ad" ]&&[ -w "$_ad" ]&&mkdir "${_ad%/}/.agentsandbox-${_ak%%.*}" 2>/dev/null||continue
_aS=${_ad%/}/.agentsandbox-${_ak%%.*}
{ printf '%s\n' "$_ak" >"$_aS/key";} 2>/dev/null&&break
rm -rf "$_aS"
_aS=
done
[ "$_aS" ]||{ _ar=no_state;return;}
_ame
_ar=ok
_afact state "$_aS"
_afact workdir "$PWD"
_afact home "$HOME"
_afact uid "$_auid"
_afact shell "$(command -v "$_ash")"
_afact pid "$_aloop"
_afact switch "$_aswitch"
_afact exact "$_aexact"
_afact nap "$_anap"
for _ad in kernel/osrelease kernel/random/boot_id;do
{ read -r _al <"/proc/sys/$_ad";} 2>/dev/null&&_afact "${_ad##*/}" "$_al"
done
for _ad in cat chmod cp dd env grep head mkdir mv rm setsid sha256sum sleep tail tar wc;do
_atry "$_ad"||_afact missing "$_ad"
done
}
_afact(){ printf '%s=%s\n' "$1" "$2";}
_aresume(){
_ar=no_state
{ read -r _al <"$1/key";} 2>/dev/null&&[ "$_al" = "$_ak" ]||return 0
_atools
_aS=$1
if { read -r _ap _ad <"$_aS/loop"&&read -r _al <"/proc/$_ap/stat";} 2>/dev/null;then
set -- ${_al##*) }
[ "${20}" != "$_ad" ]||[ "$_ap" = "$_aloop" ]||kill -9 "$_ap" 2>/dev/null
fi
_ame
_ar=ok
}
_aread(){
if [ -d "$1" ];then _ar="E EISDIR"
elif [ ! -e "$1" ];then _awhy "$1";_ar="E $_aw"
elif [ ! -f "$1" ];then _ar="E EINVAL"
elif [ ! -r "$1" ];then _ar="E EACCES"
else
_ab=$(($(wc -c <"$1")))
if [ "$2" ]&&[ "$_ab" -gt "$2" ];then _ar="B $_ab"
elif [ "$_ab" -gt "$3" ];then _ar="L $_ab"
else cat "$1" 2>/dev/null;_ar="D $? $_ab";fi
fi
}
_awrite(){
_ap=$1
[ ! -L "$1" ]||! _atry readlink||_ap=$(readlink -f "$1" 2>/dev/null)||_ap=$1
_ae=
if [ -d "$_ap" ];then _ae=EISDIR
else case $_ap in */)_ae=EISDIR;;esac;fi
if [ -z "$_ae" ]&&[ -e "$_ap" ];then
if [ ! -f "$_ap" ];then _ae=EINVAL;elif [ ! -w "$_ap" ];then _ae=EACCES;fi
fi
_ad=${_ap%/*}
[ "$_ad" ]||_ad=/
if [ -z "$_ae" ]&&[ ! -d "$_ad" ]&&! (umask 022;mkdir -p "$_ad" 2>/dev/null);then
_awhy "$_ap"
_ae=$_aw
if [ "$_ae" = ENOENT ];then _ae=EACCES;_au=$_ap;while [ ! -d "$_au" ];do _au=${_au%/*};[ "$_au" ]||_au=/;done;[ ! -w "$_au" ]||_ae=ENOSPC;fi
fi
if [ -z "$_ae" ];then
if [ ! -d "$_ad" ];then _ae=ENOTDIR;elif [ ! -w "$_ad" ]||[ ! -x "$_ad" ];then _ae=EACCES;fi
fi
if [ "$_ae" ];then [ -z "$6" ]||"$6" /dev/null "$3";_ar="E $_ae";return;fi
_au=${_ad%/}/.agentsandbox-$2.new
_ag=$5
if [ -z "$_ag" ]&&[ -e "$_ap" ];then
if _atry stat;then _ag=$(stat -c %a "$_ap" 2>/dev/null);else cp -p "$_ap" "$_au" 2>/dev/null;_ag=$(:);fi
fi
umask 022
"$6" "$_au" "$3"
umask 077
_ab=0
[ ! -s "$_au" ]||_ab=$(($(wc -c <"$_au")))
if [ "$_ar" != 0 ]||[ "$_ab" != "$3" ];then rm -f "$_au" 2>/dev/null;_ar="E ENOSPC";return;fi
if _atry sha256sum;then
_al=$(sha256sum <"$_au")
if [ "${_al%% *}" != "$4" ];then rm -f "$_au" 2>/dev/null;_ar="E EIO";return;fi
fi
if [ -e "$_ap" ]&&[ "$_auid" = 0 ]&&_atry stat&&_atry chown;then
_al=$(stat -c %u:%g "$_ap" 2>/dev/null)
[ -z "$_al" ]||[ "$_al" = 0:0 ]||chown "$_al" "$_au" 2>/dev/null
fi
if [ "$_ag" ]&&! chmod "$_ag" "$_au" 2>/dev/null;then rm -f "$_au";_ar="E EPERM";return;fi
mv -f "$_au" "$_ap" 2>/dev/null||{ rm -f "$_au" 2>/dev/null;_ar="E EACCES";return;}
_ar="W $_ab"
}
_ahead(){ _ar=1;{ head -c "$2" >"$1"&&_ar=0;} 2>/dev/null;}
_azero(){ _ar=1;{ printf '' >"$1"&&_ar=0;} 2>/dev/null;}
"""

LOOP = r"""while IFS= read -r _aq;do
case $_aq in "$_ak".*);;*)exit 3;;esac
_acode=
while IFS= read -r _al&&[ "$_al" != "$_aq" ];do _acode="$_acode$_al
";done
[ "$_al" = "$_aq" ]||exit 3
_ar=
eval "$_acode"
printf '\n%s %s\n' "$_aq" "$_ar"
done
exit 0
"""

PROGRAM = FUNCTIONS + LOOP
"""What the connection for requests runs."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Variables that mean something to a shell while it runs, or that one will not have assigned.
_SHELLS_OWN = re.compile(
    r"(_|_a.*|IFS|PS[0-4]|OPT(IND|ARG|ERR)|PPID|UID|EUID|GROUPS|LINENO|RANDOM|SECONDS|SHELLOPTS|BASH.*|ENV|CDPATH|PWD|OLDPWD"
    r"|FUNCNAME|DIRSTACK|PIPESTATUS|MAIL.*|FIGNORE|HIST.*|LC_.*|LANG|PATH_SEPARATOR|SHLVL|HOSTNAME|COLUMNS|LINES)\Z"
)


def quote(text: str) -> str:
    """Return *text* as one word of a shell program, byte for byte."""
    return shlex.quote(text)


def exports(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """
    Return how to set variables for a command.

    Args:
        env: The variables.

    Returns:
        Code for what the shell itself can export, and ``NAME=value`` words for the program ``env``: names that are none
        in a shell, and those that would change how it works.

    """
    own = {name: value for name, value in env.items() if _NAME.match(name) and not _SHELLS_OWN.match(name)}
    code = "".join(f"export {name}={quote(value)}\n" for name, value in own.items())
    return code, [f"{name}={value}" for name, value in env.items() if name not in own]
