#!/usr/bin/env bash
# Every check of this repository, from a fresh clone: makes .venv, installs the tools, then lint, format, types, import
# contracts and all tests, those with a real TorchServe included. All of them run; any that fails fails the whole.
#
#   bash scripts/test.sh [pytest's arguments]
set -euo pipefail

case "${1:-}" in
-h | --help)
    sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit
    ;;
esac

cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

environment dev
# The oracle of generation with real weights.
smollm2

failed=()
check() {
    echo "── $*"
    "$python" -m "$@" || failed+=("$1")
}

# mypy reads torch's types for most of a minute the first time, on one core: beside all the others.
echo "── mypy (beside the others; what it finds is said at the end)"
types=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$types"' EXIT
"$python" -m mypy >"$types" 2>&1 &
mypy=$!

check ruff check .
check ruff format --check .
# import-linter has no module to run.
echo "── lint-imports"
.venv/bin/lint-imports || failed+=(lint-imports)
if [ ${#failed[@]} -gt 0 ]; then
    # Said before the tests too, so that pytest's summary stays the last line.
    echo "── failed so far: ${failed[*]}"
fi
# Two at a time, file by file: much of an end-to-end test is waiting for a server. In the files' own order, which has the
# long ones early: by their number of tests, the longest would come last and run alone.
check pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
if ! wait "$mypy"; then
    echo "── mypy"
    cat "$types"
    failed+=(mypy)
fi
[ ${#failed[@]} -eq 0 ]
