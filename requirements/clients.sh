#!/usr/bin/env bash
# Install what clients.txt names, several versions of one package side by side. What stands already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

source requirements/pip_install.sh

while read -r name packages; do
    case "$name" in '' | '#'*) continue ;; esac
    folder=.venv/clients/$name
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$packages" ]; then continue; fi
    rm -rf "$folder"
    # shellcheck disable=SC2086  # a list of packages
    pip_install --no-deps --no-compile --target "$folder" $packages
    echo "$packages" >"$folder/.installed"
done <requirements/clients.txt
