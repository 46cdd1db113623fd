# SPDX-License-Identifier: Apache-2.0
"""How a shell in a sandbox gets to know what it has, finds the state of earlier ones, and serves requests."""

from __future__ import annotations

__all__ = ["LOOP", "SETUP"]

SETUP = r"""\
_atry(){ command -v "$1" >/dev/null 2>&1;}
_atools(){
umask 077
_aid
_aloop=$_ai;_asetsid=;_agrep=;_aw=;_aswitch=;_anap=1;_adrain=1;_auid=
! _atry setsid||_asetsid=$(command -v setsid)
! _atry grep||_agrep=$(command -v grep)
printf 'a\0b\0'|grep -qsF b 2>/dev/null||_agrep=
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
[ -d "$_ad" ]&&[ -w "$_ad" ]||continue
_aS=${_ad%/}/.agentsandbox-$_ak
if ! mkdir "$_aS" 2>/dev/null;then
{ read -r _al <"$_aS/key";} 2>/dev/null&&[ "$_al" = "$_ak" ]&&break
_aS=
continue
fi
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
"""
"""What there is, where state can be kept, and how it is found again."""

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
"""Serves requests."""
