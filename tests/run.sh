#!/usr/bin/env bash
# The whole suite, two files at a time; then what failed, once more and alone.
# Hundreds of tests start real servers and workers beside each other on whatever machine this is. A test that fails
# beside others and passes alone was short of the machine: it is named at the end, and is worth mending. One that
# fails twice fails the suite. So do failures in more than four files (a server that all tests of a file share takes
# them along, which counts once), and tests that did not run to their end.
# Both rounds draw the same random workloads and kills; hypothesis keeps the examples that failed by itself.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONNODEBUGRANGES=1
export LONGSHORE_TEST_SEED="${LONGSHORE_TEST_SEED:-$(date +%s)}"
most=4
failed_file=.pytest_cache/v/cache/lastfailed

rm -f "$failed_file"
.venv/bin/python -m pytest -n 2 --dist loadfile --durations 30 "$@"
status=$?
# 1: they ran to their end, and some failed.
[ $status = 1 ] && [ -s "$failed_file" ] || exit $status
failed=$(.venv/bin/python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$failed_file") || exit 1
if [ "$(cut -d: -f1 <<<"$failed" | sort -u | wc -l)" -gt $most ]; then
    echo "!! failures in more than $most files: no second round" >&2
    exit 1
fi
echo "== failed beside other tests, now alone:"
echo "$failed"
.venv/bin/python -m pytest --last-failed --last-failed-no-failures none "$@" || exit 1
printf '!! failed beside other tests and passed alone:\n%s\n' "$failed"
