#!/usr/bin/env bash
# Make .venv and install Longshore into it: everything but torch by locked versions and hashes (locked/*.txt), torch by
# the version that constraints.txt names. Finished downloads stay in caches, so that a try after a lost connection goes on.
#   requirements/install.sh [EXTRA]     EXTRA is `dev` unless given; `worker`; or `server`: what the control plane needs
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-dev}
source requirements/pip_install.sh

case "$extra" in
    server) sets=(run) ;;
    worker) sets=(run worker) ;;
    dev) sets=(run worker dev) ;;
    *) echo "no such set of packages: $extra (server, worker or dev)" >&2 && exit 2 ;;
esac

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Longshore needs Python 3.11 or newer, with its venv module; name one with PYTHON=/path/to/python3" >&2
    return 1
}

started=$SECONDS
# An environment whose making was interrupted has no pip.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -m venv --clear .venv
fi
echo "installing Longshore into .venv (torch is large: this takes some minutes the first time)"
# Bytecode of 17,000 modules takes minutes, and few of them are imported: here imports write it, where elsewhere the
# service's user may not.
if [ "$extra" = dev ]; then no_compile=--no-compile; else compile=--compile-bytecode; fi
# shellcheck disable=SC2046  # a list of options
uv_install ${compile:+"$compile"} --require-hashes --no-deps $(printf -- '--requirements requirements/locked/%s.txt ' "${sets[@]}")
# A local build of torch (+cpu) has other hashes than the public one, which brings CUDA's libraries and pins them itself.
if [ "$extra" != server ]; then pip_install ${no_compile:+"$no_compile"} --constraint requirements/constraints.txt torch; fi
pip_install --no-deps --no-build-isolation --editable .
if ! .venv/bin/python -m pip check --disable-pip-version-check; then
    echo "the locks are behind pyproject.toml: make lock" >&2
    exit 1
fi
if [ "$extra" = dev ]; then requirements/clients.sh; else rm -rf .venv/uv; fi  # an image runs without it
touch .venv/installed
echo "installed in $((SECONDS - started)) s"
