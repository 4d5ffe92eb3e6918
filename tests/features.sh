#!/usr/bin/env bash
# Builds the runtime with few features, without warnings: an item of one feature that another one needs shows here.
#
# tests/features.sh         the default features, and each store alone with one of the other features
# tests/features.sh each    each feature alone
# tests/features.sh pairs   each pair of features, too: a quarter of an hour
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# All but those that begin with an underscore.
mapfile -t features < <(sed -n '/^\[features\]/,/^\[/s/^\([a-z][a-z-]*\) = .*/\1/p' lock-runtime/Cargo.toml | grep -vx default)
[[ ${#features[@]} -ge 16 ]]

# Clippy sees all features at once, so the compiler is enough here.
build() {
    cargo rustc --quiet --package lock-runtime --lib --profile check --no-default-features --features "$1" -- -D warnings \
        || { echo "tests/features.sh: FAILED with the features \"$1\"" >&2; exit 1; }
}

if [[ $# -eq 0 ]]; then
    # An item of one store that another one needs shows, and one that a feature without a store needs. The first set has the
    # default features.
    features=("macros redis" "rediss testing" "mysql metrics serde" "postgres-tls tower" "zookeeper actix" "etcd-tls axum")
fi
# None, each, and each pair.
n="${#features[@]}"
sets=$((1 + n))
[[ "${1:-}" == pairs ]] && sets=$((sets + n * (n - 1) / 2))
echo "tests/features.sh: ${sets} sets of ${n} features"

count=1
build ""
for ((i = 0; i < ${#features[@]}; i++)); do
    build "${features[i]}"
    count=$((count + 1))
    [[ "${1:-}" == pairs ]] || continue
    for ((j = i + 1; j < ${#features[@]}; j++)); do
        build "${features[i]} ${features[j]}"
        count=$((count + 1))
    done
done
[[ ${count} -eq ${sets} ]]
echo "tests/features.sh: ${count} sets of features build in ${SECONDS} s"
