#!/usr/bin/env bash
# Make .venv and install Longshore into it, at the versions that constraints.txt names.
#   requirements/install.sh [EXTRA]     EXTRA is `dev` unless given; `none` installs what runs need, and nothing more
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-dev}
source requirements/pip_install.sh

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
pip_install --require-hashes --no-deps --requirement requirements/temporal.txt
if [ "$extra" = none ]; then target=.; else target=".[$extra]"; fi
pip_install --constraint requirements/constraints.txt --editable "$target"
if [ "$extra" = dev ]; then requirements/clients.sh; fi
touch .venv/installed
echo "installed in $((SECONDS - started)) s"
