#!/usr/bin/env bash
# Refuse commits whose subject has more than 72 characters.
#   infra/check_subjects.sh BASE      of all commits since BASE, except merges
set -euo pipefail
subjects=$(git log --no-merges --format=%s "$1..HEAD")
if long=$(LC_ALL=C.UTF-8 grep -E '^.{73,}' <<<"$subjects"); then
    printf 'more than 72 characters: %s\n' "$long" >&2
    exit 1
fi
