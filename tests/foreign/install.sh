#!/usr/bin/env bash
# Installs the lock libraries of other languages for the interoperability tests, and the schema of Grafana, into
# target/foreign. Existing installations stay.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

target="${CARGO_TARGET_DIR:-../../target}"
mkdir -p "${target}"
folder="$(cd "${target}" && pwd)/foreign"
mkdir -p "${folder}"

# The marker exists only for a complete installation; a partial one is repeated.
missing() {
    [[ ! -f "${folder}/$1.done" || "$(<"${folder}/$1.done")" != "$2" ]] && rm -rf "${folder:?}/$1" "${folder}/$1.done"
}

redis_py="redis==7.1.0"
if missing python "${redis_py}"; then
    python3 -m venv "${folder}/python"
    "${folder}/python/bin/pip" install --quiet --disable-pip-version-check "${redis_py}"
    echo "${redis_py}" >"${folder}/python.done"
fi

node_redlock="redlock@5.0.0-beta.2 ioredis@5.8.2"
if missing node "${node_redlock}"; then
    # shellcheck disable=SC2086
    npm install --silent --no-audit --no-fund --prefix "${folder}/node" ${node_redlock}
    echo "${node_redlock}" >"${folder}/node.done"
fi

grafana="@grafana/schema@13.2.3 typescript@5.9.3"
if missing grafana "${grafana}"; then
    # shellcheck disable=SC2086
    npm install --silent --no-audit --no-fund --prefix "${folder}/grafana" ${grafana}
    echo "${grafana}" >"${folder}/grafana.done"
fi

# A distribution's Go is often too old for it: used where it serves, and the test says so where not.
wanted="$(sed -n 's/^go //p' redsync/go.mod)"
found="$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//' || true)"
rm -f "${folder}/redsync.left_out"
if [[ -n "${found}" && "$(printf '%s\n' "${wanted}" "${found}" | sort -V | head -n 1)" == "${wanted}" ]]; then
    (cd redsync && go build -o "${folder}/redsync" .)
else
    rm -f "${folder}/redsync"
    echo "Go ${wanted} is not installed" | tee "${folder}/redsync.left_out"
fi

# ZooKeeper and Curator, with what they need.
zookeeper="$(sha256sum zookeeper/pom.xml)"
if [[ "${LOCK_TEST_ZOOKEEPER:-on}" != off ]] && missing zookeeper "${zookeeper}"; then
    mvn --batch-mode --quiet --file zookeeper/pom.xml dependency:copy-dependencies \
        -DoutputDirectory="${folder}/zookeeper"
    echo "${zookeeper}" >"${folder}/zookeeper.done"
fi
