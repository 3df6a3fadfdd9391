#!/usr/bin/env bash
# Print the section of CHANGELOG.md for one version; fail if there is none.
#   infra/release_notes.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
notes=$(awk -v heading="## [$1]" '/^## / { shown = index($0, heading) == 1; next } shown' CHANGELOG.md)
if [ -z "${notes//[[:space:]]/}" ]; then
    echo "CHANGELOG.md has no notes of version $1" >&2
    exit 1
fi
printf '%s\n' "$notes"
