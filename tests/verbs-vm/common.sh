# Shared by the scripts of this folder: paths, and functions that download Debian packages. They source this
# file from this folder, in bash with -euo pipefail.

repository=$(cd ../.. && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvasir/verbs-vm
mkdir -p "$cache"

# Names all missing programs at once, and the command that installs them.
need() {
    local missing=()
    for program in "$@"; do
        command -v "$program" >/dev/null || missing+=("$program")
    done
    [ ${#missing[@]} = 0 ] && return
    echo "missing: ${missing[*]}; on Debian: apt-get install --no-install-recommends" \
        "qemu-system-x86 cpio python3 binutils" >&2
    exit 2
}

# One at a time makes things in the cache; the others wait and find them made.
lock_cache() {
    exec {cache_lock}>"$cache/lock"
    flock "$cache_lock"
}

# apt as this user, with the host's sources and keys, but with lists and a state of its own: the host's
# may be stale or absent, and nothing is installed.
apt_here() {
    local program=$1
    shift
    "$program" -qq -o "Dir::State=$cache/apt" -o "Dir::State::status=$cache/apt/status" \
        -o "Dir::Cache=$cache/apt/cache" -o APT::Sandbox::User= "$@"
}

apt_lists() {
    mkdir -p "$cache/apt/lists/partial" "$cache/apt/cache/archives/partial"
    : >"$cache/apt/status"
    apt_here apt-get update
}

# fetch FOLDER PACKAGE...: downloads the packages that are not in the folder. An interrupted download leaves
# nothing there and starts again.
fetch() {
    local folder=$cache/$1 lacking=() package
    shift
    mkdir -p "$folder"
    for package in "$@"; do
        compgen -G "$folder/${package}_*.deb" >/dev/null || lacking+=("$package")
    done
    [ ${#lacking[@]} = 0 ] && return
    need apt-get apt-cache dpkg-deb
    [ -n "${lists_are_fresh:-}" ] || apt_lists
    lists_are_fresh=yes
    rm -rf "$folder/partial"
    mkdir "$folder/partial"
    (cd "$folder/partial" && apt_here apt-get download "${lacking[@]}")
    mv "$folder"/partial/*.deb "$folder"
    rmdir "$folder/partial"
}

# unpack FOLDER TARGET: the files of all packages in the folder.
unpack() {
    mkdir -p "$2"
    local package
    for package in "$1"/*.deb; do
        dpkg-deb --extract "$package" "$2"
    done
}
