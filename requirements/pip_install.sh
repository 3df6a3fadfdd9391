# Sourced by the scripts beside it, from the repository's root: pip in .venv, tried again when an index is away.

pip_install() {
    local attempt
    for attempt in 1 2 3; do
        # Its lines of what it downloads and installs are the progress; a bar for each would hide them.
        if .venv/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-input "$@" |
            sed -u -n -E 's/^ *(Downloading .*|Installing collected packages).*/  \1/p'; then
            return
        fi
        echo "pip failed (attempt $attempt of 3): pip install $*" >&2
        sleep $((attempt * 3))
    done
    return 1
}
