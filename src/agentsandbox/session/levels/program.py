# SPDX-License-Identifier: Apache-2.0
"""
What runs inside a sandbox that has a POSIX shell and no Python.

Nothing but ``sh`` and a few small programs is assumed, and no option of those beyond what BusyBox has. Every name of
ours begins with ``_a``, so that none of it is one of the image's variables.

The program serves requests, one at a time: a line with a random word, lines of code, the same word again. The answer on
standard output is whatever the code writes, and a line with the word and one line of result. What happens to commands
meanwhile is told on standard error, in single lines that begin with the session's key, and for whoever comes too late
also in files of a private directory. Output of commands is in files there, too, and never between those lines.
"""

from __future__ import annotations

__all__ = ["COMMANDS", "FILES"]

# How a command is started. What the shell puts into the background with "&" ignores SIGINT and SIGQUIT, and so does all
# that it starts. So the loop starts a pipeline in the foreground, whose last member ends the process that waits for it:
# the pipeline goes on by itself, with the signals as they were.
COMMANDS = r"""
exec 7>&2
_alaunch=@LAUNCH@
_at(){ printf '%s\n' "$_ak $*" >&7;}
_aid(){ read -r _ai _ </proc/self/stat;}
_anow(){ read -r _ac _ </proc/uptime;_ac=$((${_ac%.*}*100+1${_ac#*.}-100));}
_afail(){ { printf '%s .\n' "F $_an $1" >"$_aS/$_an.exit";} 2>/dev/null;_at F "$_an" "$1";exit;}
_aspawn(){
if [ "$3" = live ];then ( _aclaim "$@";_afeed "$1"|_apipes )
else ( _aclaim "$@";_apipes </dev/null );fi
_ar=sent
}
_aclaim(){
_an=$1;_atoken=$2;_amode=$3;_amerge=$4;_auname=$5
trap '' PIPE
set -C
{ printf '' >"$_aS/$_an.claim";} 2>/dev/null||{ [ -e "$_aS/$_an.claim" ]||_at F "$_an" no_state;exit;}
set +C
_aid
_afirst=$_ai
{ printf '' >"$_aS/$_an.out"&&printf '' >"$_aS/$_an.err";} 2>/dev/null||_afail full
}
_apipes(){
exec >/dev/null
if [ "$_amerge" = 1 ];then _amain 2>&1|_alast out
else { _amain|_acat out;} 2>&1|_alast err;fi
}
_alast(){
kill -9 "$_afirst"
exec 2>/dev/null
_astore "$1" last
[ -s "$_aS/$_an.rc" ]&&[ ! -s "$_aS/$_an.exit" ]||exit
_aend
}
_acat(){
exec 2>/dev/null 7>&-
_astore "$1" cat
}
_astore(){
printf '' >"$_aS/$_an.$2"
trap 'printf "" >"$_aS/$_an.cut"' EXIT
cat >>"$_aS/$_an.$1" 7>&-||{ printf '' >"$_aS/$_an.cut";cat >/dev/null 7>&-;}
trap - EXIT
}
_amain(){
exec 6>&2 2>/dev/null
_aid
set -C
{ printf '%s\n' "$_ai" >"$_aS/$_an.watch";}||{ [ -s "$_aS/$_an.watch" ]||_afail full;exit;}
set +C
[ "$_amode" != file ]||[ -r "$_aS/$_an.in" ]||_afail no_state
_apre=$_asetsid
[ -z "$_auname" ]||_auser "$_auname"
cd "$_acwd"||_afail no_cwd
_anow
_abegan=$_ac
(
trap - PIPE
umask 022
_aid
_aenv
if [ "$_aprog" ];then _alook "$_aprog";[ -z "$_aw" ]||{ printf '%s' "$_aw" >"$_aS/$_an.fail";exit 127;};fi
printf '%s\n' "$_ai" >"$_aS/$_an.pid"
_at S "$_an" "$_ai"
export AGENTSANDBOX_MARK="$_atoken"
[ "$_amode" != file ]||exec <"$_aS/$_an.in"
exec 2>&6 6>&- 7>&-
_ago
)
_arc=$?
read -r _ _ _ _ _aforked </proc/loadavg
_anow
_awall=$((_ac-_abegan))
exec 6>&-
if [ -s "$_aS/$_an.fail" ];then read -r _aw <"$_aS/$_an.fail"||:;_afail "$_aw";fi
read -r _al </proc/self/stat
set -- ${_al##*) }
_acpu=$((${14}+${15}))
read -r _apid <"$_aS/$_an.pid"||_apid=
_aleft
if printf '%s\n' "$_arc $_awall $_acpu" >"$_aS/$_an.rc"&&[ "$_af" = ' ' ];then exit;fi
exec >/dev/null
sleep "$_adrain"
_ax "$_arc" "$_awall" "$_acpu" $_af
}
_aleft(){
_af=' '
[ "$_aforked" != "$_apid" ]||return 0
if [ "$_agrep" ]&&! kill -0 -- "-$_apid";then
"$_agrep" -qsF "$_atoken" /proc/[0-9]*/environ||return 0
fi
_afamily "$_atoken" "$_apid" ''
}
_aend(){
read -r _arc <"$_aS/$_an.rc"||exit
[ "$1" != again ]||{ read -r _apid <"$_aS/$_an.pid";_afamily "$_atoken" "$_apid" '';_arc="$_arc$_af";}
_ax $_arc
}
_asize(){
_ar='?'
if [ -s "$1" ];then _ar=$(($(wc -c <"$1")));elif [ -e "$1" ];then _ar=0;fi
}
_ax(){
_ab="$1 $2 $3"
shift 3
_ao=0
[ ! -e "$_aS/$_an.cut" ]&&[ -e "$_aS/$_an.out" ]&&[ -e "$_aS/$_an.err" ]&&[ -e "$_aS/$_an.last" ]||_ao=1
[ "$_amerge" = 1 ]||[ -e "$_aS/$_an.cat" ]||_ao=1
_ab="$_ab $_ao"
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
setpriv)
_apre="$_apre $_aswitchp --reuid=$_au --regid=$_ag"
[ "$_am" ]&&_apre="$_apre --init-groups"||_apre="$_apre --clear-groups";;
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
if [ -z "$_aa" ];then _aw=claimed;elif [ -d "/proc/$_aa" ];then _aw="run $_apid";fi
[ ! -s "$_aS/$_an.rc" ]||_aw=ended
if { read -r _al <"$_aS/$_an.exit";} 2>/dev/null;then case $_al in *' .')_ar=${_al% .};return 0;;esac;fi
_ar=$_aw
}
"""
"""Starting commands, watching them, killing them."""

FILES = r"""\
_agiveup(){
_an=$1
set -C
{ printf '' >"$_aS/$_an.claim";} 2>/dev/null
if { printf 'none\n' >"$_aS/$_an.watch";} 2>/dev/null;then
{ printf '%s .\n' "F $_an no_fork" >"$_aS/$_an.exit";} 2>/dev/null
_at F "$_an" no_fork
elif [ ! -d "$_aS" ];then _at F "$_an" no_state
elif [ ! -s "$_aS/$_an.watch" ];then _at F "$_an" full
fi
set +C
}
_aget(){ dd if="$_aS/$1" bs=4096 skip="$2" count="$3" 2>/dev/null;_ar=$?;}
_aput(){
_ar=
{ dd bs="$2" count=1 iflag=fullblock 2>/dev/null;_ar=$?;} 2>/dev/null >"$1"
if [ "$_ar" ];then [ "$_ar" -lt 126 ]||exit 4
else dd bs="$2" count=1 iflag=fullblock >/dev/null 2>&1||exit 4;_ar=1;fi
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
if [ "$_ae" = ENOENT ];then
_ae=EACCES
_au=$_ap
while [ ! -d "$_au" ];do _au=${_au%/*};[ "$_au" ]||_au=/;done
[ ! -w "$_au" ]||_ae=ENOSPC
fi
fi
if [ -z "$_ae" ];then
if [ ! -d "$_ad" ];then _ae=ENOTDIR;elif [ ! -w "$_ad" ]||[ ! -x "$_ad" ];then _ae=EACCES;fi
fi
if [ "$_ae" ];then [ -z "$6" ]||"$6" /dev/null "$3";_ar="E $_ae";return;fi
_au=${_ad%/}/.agentsandbox-$2.$$.new
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
"""Reading and writing files, ours and the user's."""
