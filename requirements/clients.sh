#!/usr/bin/env bash
# Install what clients.txt names, several versions of one package side by side. What stands already is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."

source requirements/pip_install.sh

find_version() { # python3.12: on the path, or pyenv's, whose commands on the path run only where they are chosen
    local candidate
    for candidate in "$1" "$HOME/.pyenv/versions/${1#python}".*/bin/python; do
        if "$candidate" -c "import sys; v = sys.version_info; sys.exit(f'python{v[0]}.{v[1]}' != '$1')" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

while read -r name packages; do
    case "$name" in '' | '#'*) continue ;; esac
    folder=.venv/clients/${name%\?}
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$packages" ]; then continue; fi
    rm -rf "$folder"
    python=.venv/bin/python
    case "$packages" in
        python*)
            if ! python=$(find_version "${packages%% *}"); then
                echo "there is no ${packages%% *} here: $name is left out, and its tests are skipped" >&2
                continue
            fi
            ;;
    esac
    # shellcheck disable=SC2086  # a list of packages
    if ! PYTHON_OF_PACKAGES=$python uv_install --no-deps --target "$folder" ${packages#python3.[0-9]* }; then
        if [ "${name%\?}" = "$name" ]; then exit 1; fi
        echo "${name%\?} cannot be had here: it is left out, and its tests are skipped" >&2
        rm -rf "$folder"
        continue
    fi
    echo "$python" >"$folder/.python"
    echo "$packages" >"$folder/.installed"
done <requirements/clients.txt
