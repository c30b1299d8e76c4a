#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs commands in a bare system, like that of a new user: a chroot in build/bare/SYSTEM with the
# essential packages, git and CA certificates. From this machine it takes only the name servers,
# apt's sources for that distribution, proxies, the pip index and the CA certificates.
#
#   scripts/bare.sh make SYSTEM              creates the system anew
#   scripts/bare.sh root SYSTEM COMMAND...   runs a command as root in this clone, which has the same
#                                            path inside
#   scripts/bare.sh user SYSTEM COMMAND...   runs a command as the user `dev` in the user's copy of
#                                            the clone, ~/switchyard
#   scripts/bare.sh sudo SYSTEM              allows that user to call sudo without a password
#   scripts/bare.sh remove SYSTEM            removes the system
#   scripts/bare.sh second                   prints ubuntu24.04, or debian13 if Ubuntu's archive does
#                                            not answer
#
# Systems: debian12, debian13, ubuntu24.04. Requires root, debootstrap (`./dev setup bare`) and
# mount and process namespaces; if one is missing, exits with status 2 and the reason. Mounts exist
# only in the command's namespace: they vanish with it, however it ends, and the kernel kills the
# command's remaining processes. For `root` the system is a chroot, where / is an ordinary folder;
# for `user` it is the root of the namespace, as on a real machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
readonly root=$PWD
readonly self=$root/scripts/bare.sh

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'bare: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '3,/^set /{/^#/s/^# \{0,1\}//p}' "$self"; }

# The package with the keys of Ubuntu's archive, which Debian 12 does not have.
readonly ubuntu=http://archive.ubuntu.com/ubuntu
readonly ubuntu_keys=pool/main/u/ubuntu-keyring/ubuntu-keyring_2023.11.28.1_all.deb
readonly ubuntu_keys_sha256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8

# choose SYSTEM: sets its name, folder, suite, archive and components.
choose() {
  system=$1 tree=$root/build/bare/$1 components=main
  keyring=/usr/share/keyrings/debian-archive-keyring.gpg archive=http://deb.debian.org/debian security=http://deb.debian.org/debian-security
  case $system in
    debian12) suite=bookworm ;;
    debian13) suite=trixie ;;
    ubuntu24.04)
      suite=noble archive=$ubuntu security=http://security.ubuntu.com/ubuntu components='main universe'
      keyring=$root/build/bare/ubuntu-keys/usr/share/keyrings/ubuntu-archive-keyring.gpg
      ;;
    *) die "no system '$system'; allowed: debian12, debian13, ubuntu24.04" ;;
  esac
}

require_privileges() {
  [[ $EUID -eq 0 ]] || die "a bare system needs root, for chroot and mounts; this is user $(id -un)"
  command -v debootstrap >/dev/null || die "there is no debootstrap; install it: ./dev setup bare"
  local reason
  reason=$(unshare --mount --pid --fork --propagation private mount -t tmpfs none /mnt 2>&1) ||
    die "this machine does not allow namespaces of mounts and processes, and mounts in them: $reason"
}

# in_namespaces COMMAND...: runs the command and its child processes with separate mounts, until it ends or this process is
# killed.
in_namespaces() { setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --propagation private -- "$@"; }

# fetch URL FILE [SHA256]: downloads a file with apt's proxy settings.
fetch() {
  mkdir -p "$(dirname "$2")"
  rm -f "$2"
  /usr/lib/apt/apt-helper -o Acquire::Retries=2 -o Acquire::http::Timeout=30 download-file "$1" "$2" ${3:+"SHA256:$3"} >/dev/null 2>&1
}

verb_second() {
  if fetch "$ubuntu/dists/noble/InRelease" "$root/build/bare/InRelease"; then echo ubuntu24.04; else echo debian13; fi
}

# Prints the lines of sources.list for this suite: those of this machine if it has any, else those for the distribution's
# archive.
apt_sources() {
  local lines
  # shellcheck disable=SC2016  # the variables are apt's
  lines=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk -v suite="$suite" '$3 == suite || $3 == suite "-updates" || $3 == suite "-security"' | sort -u)
  if ! grep -q " $suite main\$" <<<"$lines"; then
    lines=$(printf "deb %s $suite $components\n" "$archive"
      printf "deb %s $suite-updates $components\n" "$archive"
      printf "deb %s $suite-security $components\n" "$security")
  fi
  echo "$lines"
}

# Names of the variables for access to archives and indexes and for builds and tests in CI.
readonly passed_variables='^((http|https|ftp|all|no)_proxy|(HTTP|HTTPS|FTP|ALL|NO)_PROXY|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|CERT|CLIENT_CERT|PROXY|DEFAULT_TIMEOUT|TIMEOUT|RETRIES|CONFIG_FILE)|CI|CTEST_OUTPUT_ON_FAILURE|SWITCHYARD_WERROR)$'
passed_environment() {
  local name
  for name in $(compgen -e | grep -E "$passed_variables"); do printf '%s=%s\n' "$name" "${!name}"; done
}

# copy FILE [AS]: copies a file from this machine into the system, if it exists.
copy() {
  [[ -f $1 ]] || return 0
  install -D -m 644 "$1" "$tree${2:-$1}"
}

# Copies this machine's settings into the system.
provision() {
  local line file
  copy /etc/resolv.conf
  printf '127.0.0.1 localhost %s\n' "$(uname -n)" >"$tree/etc/hosts"
  rm -f "$tree"/etc/apt/sources.list.d/*
  apt_sources >"$tree/etc/apt/sources.list"
  apt-config dump | grep -E '^Acquire::(https?::(Proxy|Timeout)|Retries|Check-Valid-Until|Check-Date)' >"$tree/etc/apt/apt.conf.d/80host" || true
  for line in http https; do
    file=${line}_proxy
    [[ -z ${!file:-} ]] || printf 'Acquire::%s::Proxy "%s";\n' "$line" "${!file}" >>"$tree/etc/apt/apt.conf.d/80host"
  done
  copy /etc/ssl/certs/ca-certificates.crt
  for file in /usr/local/share/ca-certificates/*.crt; do copy "$file"; done
  while IFS='=' read -r line file; do
    [[ ! $line =~ (CERT|BUNDLE|CONFIG_FILE) || -e $tree$file ]] || copy "$file"
  done < <(passed_environment)
  for file in /etc/pip.conf /etc/xdg/pip/pip.conf; do copy "$file"; done
  for file in .config/pip/pip.conf .pip/pip.conf; do
    copy "$HOME/$file" "/root/$file"
    copy "$HOME/$file" "/etc/skel/$file"
  done
}

# Saves the clone in its current state: tracked files that exist, and new ones that git does not ignore. This is done first,
# because pages that CI later runs in the clone create files and remove them again.
save_clone() {
  git ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do [[ ! -e $file && ! -L $file ]] || printf '%s\0' "$file"; done |
    tar -c --null -T - -f "$tree.tar"
}

# Creates the user `dev`, who may not use sudo, and that user's copy of the clone.
make_user() {
  chroot "$tree" useradd --create-home --shell /bin/bash dev
  mkdir "$tree/home/dev/switchyard"
  tar -x -f "$tree.tar" -C "$tree/home/dev/switchyard"
  rm "$tree.tar"
  chroot "$tree" chown -R dev:dev /home/dev/switchyard
}

verb_remove() {
  if awk -v tree="$tree" '$2 == tree || index($2, tree "/") == 1 {found = 1} END {exit !found}' /proc/self/mounts; then
    die "something is mounted in $tree, and removing it would remove what is mounted there: umount it first"
  fi
  rm -rf --one-file-system "$tree"
}

verb_make() {
  require_privileges
  verb_remove
  mkdir -p "$tree"
  save_clone
  local script=()
  if [[ $system == ubuntu* ]]; then
    local package=$root/build/bare/ubuntu-keys.deb
    fetch "$ubuntu/$ubuntu_keys" "$package" "$ubuntu_keys_sha256" || die "cannot get $ubuntu/$ubuntu_keys, or it has another checksum"
    dpkg-deb -x "$package" "$root/build/bare/ubuntu-keys"
    # Debian 12's debootstrap has no script for this suite; all suites of Ubuntu since 2007 use this one
    script=(/usr/share/debootstrap/scripts/gutsy)
  fi
  local mirror
  mirror=$(apt_sources | awk -v suite="$suite" '$3 == suite {print $2; exit}')
  local proxy
  proxy=$(apt-config dump | sed -nE 's/^Acquire::http::Proxy "(.*)";$/\1/p')
  [[ -z $proxy || $proxy == DIRECT ]] || export http_proxy=${http_proxy:-$proxy}  # debootstrap ignores apt's proxy
  say "making $system from $mirror in $tree"
  in_namespaces debootstrap --variant=minbase --include=git,ca-certificates --components=main --keyring="$keyring" \
    "$suite" "$tree" "$mirror" "${script[@]}" >"$tree.log" 2>&1 || { tail -n 20 "$tree.log" >&2; die "debootstrap failed; all it said: $tree.log"; }
  provision
  make_user
  say "made $system ($(du -sh --one-file-system "$tree" | cut -f1))"
}

verb_sudo() {
  run_inside root apt-get -qq update
  run_inside root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 install -y --no-install-recommends sudo
  echo 'dev ALL=(ALL) NOPASSWD: ALL' >"$tree/etc/sudoers.d/dev"
  chmod 440 "$tree/etc/sudoers.d/dev"
}

# run_inside root|user COMMAND...
run_inside() {
  require_privileges
  [[ -x $tree/usr/bin/git ]] || die "there is no system in $tree; make it: scripts/bare.sh make $system"
  in_namespaces "$BASH" "$self" inside "$system" "$@"
}

# Runs inside the namespaces: mounts the file systems of a machine and runs the command. Do not call manually.
verb_inside() {
  local who=$1 environment home=/root folder=$root enter=(chroot "$tree")
  shift
  [[ $$ == 1 ]] || die "inside: is for this script itself"
  [[ $who != user ]] || mount --bind "$tree" "$tree"
  mount -t proc proc "$tree/proc"
  mount -t sysfs -o ro sysfs "$tree/sys"
  mount -t tmpfs -o mode=1777,nosuid,nodev shm "$tree/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts "$tree/dev/pts"
  mapfile -t environment < <(passed_environment)
  if [[ $who == user ]]; then
    home=/home/dev folder=/home/dev/switchyard
    cd "$tree" && pivot_root . . && umount -l .  # the old root is mounted over the new one until it is unmounted
    enter=(setpriv --reuid dev --regid dev --init-groups)
  else
    mkdir -p "$tree$root"
    mount --bind "$root" "$tree$root"
  fi
  environment+=("HOME=$home" "USER=$([[ $who == user ]] && echo dev || echo root)" LANG=C.UTF-8
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)
  # No exec: a first process that is not a shell neither reaps orphans nor dies from its own signals.
  # shellcheck disable=SC2016
  env -i "${environment[@]}" "${enter[@]}" bash -c 'cd "$1" && shift && exec "$@"' bash "$folder" "$@" && return || return $?
}

main() {
  local verb=${1:-} who
  case $verb in
    second) verb_second; return ;;
    make | remove | sudo) [[ $# -eq 2 ]] || die "$verb takes one system" ;;
    root | user | inside) [[ $# -ge 3 ]] || die "$verb takes a system and a command" ;;
    -h | --help) usage; return ;;
    *) usage >&2; exit 2 ;;
  esac
  choose "$2"
  shift 2
  who=$verb
  case $verb in
    root | user) run_inside "$who" "$@" ;;
    *) "verb_$verb" "$@" ;;
  esac
}

main "$@"
