# Sourced by .ci/run: this checkout as a stranger meets it, in a Debian that has Python and nothing else.
# A pristine root is made once for each release and kept as an archive; each run unpacks it anew. What tells pip and apt
# where packages come from is bound into it at its own place, read-only, and never copied. It needs root. Whoever
# sources this calls `bare_end` however it ends.

BARE_FOLDER="$(realpath -m "${FASTDEPLOY_CACHE_CI_FOLDER:-/var/cache/fastdeploy_cache-ci}")" # as mounts name it
BARE_ROOT=""

# bare_begin RELEASE: unpacks its root into BARE_ROOT and binds what it needs. False, and a line: it cannot be had.
# It is called where `set -e` is off, so each step says what becomes of its failure.
bare_begin() {
    local release="$1" path
    [ "$(id -u)" = 0 ] || bare_cannot "this takes root" || return 1
    mkdir -p "$BARE_FOLDER" || bare_cannot "no folder $BARE_FOLDER" || return 1
    bare_clear
    bare_archive "$release" || return 1
    BARE_ROOT="$(mktemp -d "$BARE_FOLDER/root.XXXXXX")" || bare_cannot "no folder for it" || return 1
    chmod 755 "$BARE_ROOT"
    tar -xf "$BARE_FOLDER/$release.tar" -C "$BARE_ROOT" --exclude=./dev || bare_cannot "tar failed" || return 1
    mkdir -p "$BARE_ROOT/dev"
    for path in /proc /sys /dev /dev/pts /dev/shm; do
        mount --bind "$path" "$BARE_ROOT$path" && mount --make-private "$BARE_ROOT$path" ||
            bare_cannot "$path cannot be mounted" || return 1
    done
    while read -r path; do
        bare_bind "$path" || bare_cannot "$path cannot be bound" || return 1
    done < <(bare_packages_from | sort -u)
    chroot "$BARE_ROOT" useradd --create-home stranger || bare_cannot "no chroot" || return 1
    for path in root home/stranger; do
        git clone --quiet --no-hardlinks . "$BARE_ROOT/$path/checkout" || bare_cannot "git clone failed" || return 1
    done
    chroot "$BARE_ROOT" chown -R stranger: /home/stranger || bare_cannot "chown failed" || return 1
}

# bare_clear: roots that a killed run has left
bare_clear() {
    local left
    for left in "$BARE_FOLDER"/root.*; do
        [ ! -d "$left" ] || BARE_ROOT="$left" bare_end
    done
    BARE_ROOT=""
}

# bare_end: ends what runs in the root, unmounts all of it, and removes it only when nothing of the host is left in it
bare_end() {
    [ -n "$BARE_ROOT" ] || return 0
    local root="$BARE_ROOT" place process
    BARE_ROOT=""
    [[ "$root" == "$BARE_FOLDER"/root.* ]] || return 0
    for process in /proc/[0-9]*; do
        [ "$(readlink "$process/root")" != "$root" ] || kill -KILL "${process#/proc/}" 2>/dev/null || true
    done
    # the last mounted first: some lie inside others
    while read -r place; do umount --lazy "$place" || true; done < <(
        awk -v root="$root/" 'index($5, root) == 1 { print $5 }' /proc/self/mountinfo | tac
    )
    if grep -qF " $root/" /proc/self/mountinfo ||
        [ -n "$(ls -A "$root/dev" "$root/proc" 2>/dev/null | grep -v :)" ]; then
        say "something is still mounted below $root; it is left there"
    else
        rm -rf --one-file-system "$root"
    fi
}

# bare_archive RELEASE: the pristine root, at most a month old
bare_archive() {
    local release="$1" archive="$BARE_FOLDER/$1.tar" mirror
    [ -z "$(find "$archive" -mtime -30 2>/dev/null)" ] || return 0
    if ! command -v mmdebstrap >/dev/null; then
        say "installing with apt-get: mmdebstrap"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mmdebstrap; } >/dev/null ||
            bare_cannot "apt-get cannot install mmdebstrap" || return 1
    fi
    mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' | head -n 1)"
    say "making a bare Debian root: $release"
    timeout 600 mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv "$release" \
        "$archive.new.tar" "${mirror:-http://deb.debian.org/debian}" || bare_cannot "mmdebstrap failed" || return 1
    mv "$archive.new.tar" "$archive"
}

# bare_cannot WHY: false; in CI the end
bare_cannot() {
    [ -z "${CI:-}" ] || die "CI has to have a bare Debian root: $1"
    bare_end
    say "the bare Debian root is left out: $1"
    return 1
}

# bare_packages_from: files and folders that say where packages and names come from
bare_packages_from() {
    local words
    printf '%s\n' /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/apt/apt.conf.d /etc/pip.conf \
        "${XDG_CONFIG_HOME:-$HOME/.config}/pip" /etc/xdg/pip
    words="$("$PYTHON" -m pip config list; env | grep -E '^(PIP_|SSL_CERT_FILE=|REQUESTS_CA_BUNDLE=)' || true)"
    # an index in a folder names files beside it, so what is bound is the folder above
    grep -oE "file:///[^ '\",]+" <<<"$words" | sed 's|^file://||' | xargs -r -n 1 dirname || true
    sed "s|file:///[^ '\",]*||g" <<<"$words" | grep -oE "/[^ '\"=,]+" || true
}

# bare_bind PATH: at its own place, read-only, where there is one. Never a folder that the root needs for itself.
bare_bind() {
    local path="$1" place="$BARE_ROOT$1"
    case "$path" in
    / | /bin | /dev | /etc | /home | /lib | /opt | /root | /sbin | /srv | /tmp | /usr | /var) return 0 ;;
    esac
    [ ! "$place" -ef "$path" ] || return 0 # its folder is bound
    if [ -d "$path" ]; then
        mkdir -p "$place"
    elif [ -f "$path" ]; then
        mkdir -p "$(dirname "$place")"
        touch "$place"
    else
        return 0
    fi
    mount --bind "$path" "$place" && mount --make-private "$place" || return 1
    mount -o remount,bind,ro "$place" || { umount "$place" && return 1; }
}

# bare_run SECONDS USER COMMAND...: in the root, in the user's own checkout, with pip's variables and no others
bare_run() {
    local seconds="$1" user="$2" home=/root
    shift 2
    [ "$user" = root ] || home="/home/$user"
    local kept=()
    while IFS= read -r line; do kept+=("$line"); done < <(env | grep -E '^(PIP_|SSL_CERT_|REQUESTS_CA_BUNDLE=)')
    timeout --kill-after=30 "$seconds" chroot --userspec="$user:$user" "$BARE_ROOT" /usr/bin/env -i "${kept[@]}" \
        HOME="$home" PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
        bash -c 'cd ~/checkout && exec "$@"' bash "$@"
}

# bare_refusal: what an ordinary user is told where apt would have to bring something: one line, soon, status 1
bare_refusal() {
    local said status=0
    said="$(bare_run 5 stranger ./launch/quickstart.sh 2>&1)" || status=$?
    printf '%s\n' "$said"
    [ "$status" = 1 ] && [ "$(wc -l <<<"$said")" = 1 ] && grep -q 'apt-get install libgomp1$' <<<"$said" ||
        die "as a user without libgomp1 the quickstart ended with status $status and should have named it in one line"
}
