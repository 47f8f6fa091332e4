# Sourced by .ci/run: this checkout as a stranger meets it, in a Debian that has Python and nothing else.
# A pristine root is made once for each release and kept as an archive; each run unpacks it anew. What tells pip and apt
# where packages come from is bound into it at its own place, read-only, and never copied. It needs root.

BARE_FOLDER="${FASTDEPLOY_CACHE_CI_FOLDER:-/var/cache/fastdeploy_cache-ci}"
BARE_ROOT=""

# bare_begin RELEASE: unpacks its root into BARE_ROOT and binds what it needs. False: it cannot be had; said in one line.
bare_begin() {
    local release="$1" path
    bare_archive "$release" || return 1
    trap bare_end EXIT
    BARE_ROOT="$(mktemp -d "$BARE_FOLDER/root.XXXXXX")"
    chmod 755 "$BARE_ROOT"
    tar -xf "$BARE_FOLDER/$release.tar" -C "$BARE_ROOT" --exclude=./dev
    mkdir -p "$BARE_ROOT/dev"
    for path in /proc /sys /dev /dev/pts /dev/shm; do mount --bind "$path" "$BARE_ROOT$path"; done
    bare_packages_from | sort -u | while read -r path; do bare_bind "$path"; done
    chroot "$BARE_ROOT" useradd --create-home stranger
    for path in root home/stranger; do git clone --quiet --no-hardlinks . "$BARE_ROOT/$path/checkout"; done
    chroot "$BARE_ROOT" chown -R stranger: /home/stranger
}

bare_end() {
    [ -n "$BARE_ROOT" ] || return 0
    local place
    # the last mounted first: some lie inside others
    while read -r place; do umount --lazy "$place"; done < <(
        awk -v root="$BARE_ROOT/" 'index($5, root) == 1 { print $5 }' /proc/self/mountinfo | tac
    )
    if grep -q " $BARE_ROOT/" /proc/self/mountinfo; then
        say "something is still mounted below $BARE_ROOT; it is left there"
    else
        rm -rf --one-file-system "$BARE_ROOT"
    fi
    BARE_ROOT=""
}

# bare_archive RELEASE: the pristine root, at most a month old
bare_archive() {
    local release="$1" archive="$BARE_FOLDER/$1.tar" mirror
    [ "$(id -u)" = 0 ] || bare_cannot "not root" || return 1
    mkdir -p "$BARE_FOLDER"
    [ -z "$(find "$archive" -mtime -30 2>/dev/null)" ] || return 0
    command -v mmdebstrap >/dev/null || need_packages mmdebstrap
    mirror="$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' | head -n 1)"
    say "making a bare Debian root: $release"
    timeout 600 mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv "$release" \
        "$archive.new.tar" "${mirror:-http://deb.debian.org/debian}" || bare_cannot "mmdebstrap failed" || return 1
    mv "$archive.new.tar" "$archive"
}

# bare_cannot WHY: false; in CI the end
bare_cannot() {
    [ -z "${CI:-}" ] || die "CI has to have a bare Debian root: $1"
    say "the bare Debian root is left out: $1"
    return 1
}

# bare_packages_from: files and folders that say where packages and names come from
bare_packages_from() {
    local words
    printf '%s\n' /etc/resolv.conf /etc/hosts /etc/ssl/certs/ca-certificates.crt /etc/apt/apt.conf.d /etc/pip.conf \
        "${XDG_CONFIG_HOME:-$HOME/.config}/pip" /etc/xdg/pip
    words="$("$PYTHON" -m pip config list; env | grep '^PIP_' || true)"
    # an index in a folder names files beside it, so what is bound is the folder above
    grep -oE "file:///[^ '\"=,]+" <<<"$words" | sed 's|^file://||' | xargs -r -n 1 dirname || true
    sed "s|file:///[^ '\"=,]*||g" <<<"$words" | grep -oE "/[^ '\"=,]+" || true
}

# bare_bind PATH: at its own place, read-only, where there is one
bare_bind() {
    local path="$1" place="$BARE_ROOT$1"
    [ ! "$place" -ef "$path" ] || return 0 # its folder is bound
    if [ -d "$path" ]; then
        mkdir -p "$place"
    elif [ -f "$path" ]; then
        mkdir -p "$(dirname "$place")"
        touch "$place"
    else
        return 0
    fi
    mount --bind "$path" "$place"
    mount -o remount,bind,ro "$place"
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
