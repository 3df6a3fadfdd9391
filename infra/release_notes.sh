#!/usr/bin/env bash
# Print what CHANGELOG.md says of one version; fail where it says nothing.
#   infra/release_notes.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
notes=$(awk -v heading="## [$1]" '/^## / { shown = index($0, heading) == 1; next } shown' CHANGELOG.md)
if [ -z "${notes//[[:space:]]/}" ]; then
    echo "CHANGELOG.md has no notes of version $1" >&2
    exit 1
fi
printf '%s\n' "$notes"
