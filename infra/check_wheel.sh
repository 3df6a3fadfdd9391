#!/usr/bin/env bash
# Build the wheel into dist/, install it into a clean virtual environment outside the checkout, and use it there as a
# user would, by the commands of docs/first_run.md: a stack, a run, a chat, `longshore doctor`. Third-party packages
# come from .venv, so that nothing large is downloaded again; what is ours must come from the wheel.
#   infra/check_wheel.sh [--build-only]
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD

rm -rf build/lib build/bdist.* dist
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
rm -rf build/lib build/bdist.*
ls -l dist
if [ "${1:-}" = --build-only ]; then exit; fi

folder=$(mktemp -d "${TMPDIR:-/tmp}/longshore-wheel.XXXXXX")
leave() {
    "$folder/venv/bin/longshore" dev --stop --root "$folder/first/root" >/dev/null 2>&1 || true
    rm -rf "$folder"
}
trap leave EXIT

echo "== a clean environment"
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index dist/longshore-*.whl
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# A folder named in a .pth has its own .pth files ignored: the editable install of the checkout stays out.
site_packages "$repository/.venv" >"$(site_packages "$folder/venv")/third_party.pth"
ln -s "$repository/.venv/bin/temporal" "$folder/venv/bin/temporal"
cp -r examples "$folder/examples"  # not in the wheel: they make the tiny model, and are read beside it

cd "$folder"
unset PYTHONPATH LONGSHORE_ROOT LONGSHORE_API_URL LONGSHORE_API_KEY LONGSHORE_STORE_URI
export PATH=$folder/venv/bin:$PATH LONGSHORE_WANDB_MODE=disabled
python -P - "$repository" <<'PYTHON'
import importlib, sys
for name in ("shared", "workflows", "activities", "megatron_worker", "service"):
    path = importlib.import_module(name).__file__
    assert path and not path.startswith(sys.argv[1]), f"{name} is the checkout's: {path}"
PYTHON

echo "== the commands of docs/first_run.md"
awk '/^```bash$/ { shown = 1; next } /^```$/ { shown = 0 } shown' "$repository/docs/first_run.md" >commands.sh
# The page of a running stack, whose templates and static files are package data.
cat >page.py <<'PYTHON'
import json, urllib.request
address = json.load(open("first/root/dev.json"))["api_url"]
for path in ("/login", "/static/page.css", "/static/page.js"):
    with urllib.request.urlopen(address + path, timeout=60) as answer:
        assert answer.status == 200 and answer.read(), path
PYTHON
sed -i 's/^longshore doctor$/longshore doctor\npython page.py/' commands.sh
bash -euo pipefail commands.sh
test -s first/adapter/adapter_model.safetensors
echo "the wheel works"
