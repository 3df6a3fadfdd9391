# Sourced by the scripts beside it, from the repository's root: packages into .venv, tried again when an index is away.

thrice() {
    local attempt
    for attempt in 1 2 3; do
        if "$@"; then return; fi
        echo "failed (attempt $attempt of 3): $*" >&2
        sleep $((attempt * 3))
    done
    return 1
}

# Its lines of what it downloads and installs are the progress; a bar for each would hide them.
install_by_pip() {
    .venv/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-input "$@" |
        sed -u -n -E 's/^ *(Downloading .*|Installing collected packages).*/  \1/p'
}

pip_install() { thrice install_by_pip "$@"; }

# Its lines of what it downloads and how much it has installed are the progress.
install_by_uv() {
    .venv/uv/bin/uv pip install --no-progress --python "${PYTHON_OF_PACKAGES:-.venv/bin/python}" "$@" 2>&1 |
        sed -u -E '/^( [+~-] |Using |Resolved |Prepared | *Downloaded | *Building | *Built )/d'
}

# The same by uv: `make setup` took 85 s so, and 275 s by pip, on two slow cores. It knows nothing of pip's settings: an
# index of one's own is UV_DEFAULT_INDEX.
uv_install() {
    if ! cmp -s requirements/uv.txt .venv/uv/installed.txt; then
        rm -rf .venv/uv
        pip_install --require-hashes --target .venv/uv --requirement requirements/uv.txt
        cp requirements/uv.txt .venv/uv/installed.txt
    fi
    thrice install_by_uv "$@"
}
