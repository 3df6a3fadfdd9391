# Sourced by the scripts beside it, from the repository's root: pip in .venv, tried again when an index is away.

pip_install() {
    local attempt
    for attempt in 1 2 3; do
        if .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input "$@"; then
            return
        fi
        echo "pip failed (attempt $attempt of 3): pip install $*" >&2
        sleep $((attempt * 3))
    done
    return 1
}
