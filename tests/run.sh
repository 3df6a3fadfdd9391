#!/usr/bin/env bash
# The whole suite, two files at a time (LONGSHORE_TEST_PROCESSES says otherwise; each takes 2 to 4 GiB); then what
# failed, once more and alone. Three at a time on two cores are no faster, and more tests run out of patience.
# Hundreds of tests start real servers and workers beside each other on whatever machine this is. A test that fails
# beside others and passes alone was short of the machine: it is named at the end, and is worth mending. One that
# fails twice fails the suite. So do more failures than a busy machine explains (tests/failures.py: eight causes, where
# all errors of a file count as one, or four files), and tests that did not run to their end. The end says how many
# tests failed and how many had errors, beside the number of files.
# Both rounds draw the same random workloads and kills; hypothesis keeps the examples that failed by itself.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONNODEBUGRANGES=1
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the same modules, each for itself
export LONGSHORE_TEST_SEED="${LONGSHORE_TEST_SEED:-$(date +%s)}"
cache="${LONGSHORE_TEST_CACHE:-$PWD/.pytest_cache}"
failures="$cache/v/longshore/failures"

rm -f "$failures" "$cache/v/cache/lastfailed"
# What the run costs counts by its first round alone (tests/costs.py).
.venv/bin/python -m pytest -p tests.costs -n "${LONGSHORE_TEST_PROCESSES:-2}" --dist loadfile --durations 30 -o cache_dir="$cache" "$@"
status=$?
costs() { .venv/bin/python -m tests.costs tell "$cache"; }
[ $status != 0 ] || { costs; exit; }
# 1: they ran to their end, and some failed.
[ $status = 1 ] && [ -s "$failures" ] || exit $status
first_round=$(.venv/bin/python -m tests.failures "$failures")
case $? in
    0) ;;
    *) printf '!! too much for a second round: %s\n' "$first_round" >&2; exit 1 ;;
esac
printf '== failed beside other tests, now alone: %s\n' "$first_round"
rm -f "$failures"
.venv/bin/python -m pytest --last-failed --last-failed-no-failures none -o cache_dir="$cache" "$@" || {
    printf '!! failed beside other tests: %s\n' "$first_round" >&2
    [ -s "$failures" ] && printf '!! and alone: %s\n' "$(.venv/bin/python -m tests.failures "$failures")" >&2
    exit 1
}
costs
status=$?
printf '!! failed beside other tests and passed alone: %s\n' "$first_round"
exit $status
