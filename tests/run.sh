#!/usr/bin/env bash
# The whole suite, two files at a time (LONGSHORE_TEST_PROCESSES says otherwise; each takes 2 to 4 GiB); then what
# failed, once more and alone. Three at a time on two cores are no faster, and more tests run out of patience.
# Hundreds of tests start real servers and workers beside each other on whatever machine this is. A test that fails
# beside others and passes alone was short of the machine: it is named at the end, and is worth mending. One that
# fails twice fails the suite. So do failures in more than four files, which no busy machine explains, and tests that
# did not run to their end.
# Both rounds draw the same random workloads and kills; hypothesis keeps the examples that failed by itself.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONNODEBUGRANGES=1
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile the same modules, each for itself
# What is drawn follows from the files that are committed: who runs a commit again draws the same.
seed=$(git rev-parse --short=7 'HEAD^{tree}' 2>/dev/null) || seed=0
export LONGSHORE_TEST_SEED="${LONGSHORE_TEST_SEED:-$((16#$seed))}"
# `.ci/run` runs this part of the files that take long, and all of the others.
export LONGSHORE_TEST_SHARE="${LONGSHORE_TEST_SHARE:-1}"
[ "$LONGSHORE_TEST_SHARE" = 1 ] ||
    echo "!! of the files that take long $LONGSHORE_TEST_SHARE are drawn, by seed $LONGSHORE_TEST_SEED"
cache="${LONGSHORE_TEST_CACHE:-$PWD/.pytest_cache}"
last_failed="$cache/v/cache/lastfailed"
failed() { .venv/bin/python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$last_failed"; }

rm -f "$last_failed"
# What files take is noted of the first round alone (tests/costs.py).
.venv/bin/python -m pytest -p tests.costs -n "${LONGSHORE_TEST_PROCESSES:-2}" --dist loadfile --durations 30 -o cache_dir="$cache" "$@"
status=$?
[ $status != 0 ] || exit 0
# 1: they ran to their end, and some failed.
[ $status = 1 ] && [ -s "$last_failed" ] || exit $status
first_round=$(failed)
if [ "$(cut -d: -f1 <<<"$first_round" | sort -u | wc -l)" -gt 4 ]; then
    printf '!! too much for a second round:\n%s\n' "$first_round" >&2
    exit 1
fi
printf '== failed beside other tests, now alone:\n%s\n' "$first_round"
.venv/bin/python -m pytest --last-failed --last-failed-no-failures none -o cache_dir="$cache" "$@" || {
    printf '!! failed beside other tests:\n%s\n!! and alone:\n%s\n' "$first_round" "$(failed)" >&2
    exit 1
}
printf '!! failed beside other tests and passed alone:\n%s\n' "$first_round"
