#!/usr/bin/env bash
# Build the wheel into dist/, install it outside the checkout, and use it there as a user would: the client in one
# environment, with httpx and pydantic alone; the server in another, by the commands of docs/first_run.md: a stack, a
# run, a chat, `longshore doctor`. Both run in a project that has its own packages `shared`, `service`,
# `workflows`, `activities` and `megatron_worker`. The server's third-party packages come from .venv, so that
# nothing large is downloaded again; Longshore's own code must come from the wheel.
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
unset PYTHONPATH LONGSHORE_ROOT LONGSHORE_API_URL LONGSHORE_API_KEY LONGSHORE_STORE_URI
site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

echo "== the client: pip install longshore"
.venv/bin/python -m venv "$folder/client"
"$folder/client/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint requirements/constraints.txt dist/longshore-*.whl
"$folder/client/bin/python" -P - <<'PYTHON'
from importlib.metadata import distributions, files
names = {each.name.lower().replace("_", "-") for each in distributions()} - {"pip", "setuptools"}
of_httpx = {"httpx", "httpcore", "h11", "anyio", "sniffio", "idna", "certifi", "typing-extensions"}
of_pydantic = {"pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"}
assert names <= {"longshore"} | of_httpx | of_pydantic, names
top = {path.parts[0] for path in files("longshore")} - {"..", "longshore"}
assert all(name.endswith(".dist-info") for name in top), top
PYTHON
if said=$("$folder/client/bin/longshore" ls 2>&1); then exit 1; fi
grep -q "pip install 'longshore\[server\]'" <<<"$said" && [ "$(wc -l <<<"$said")" = 1 ]

echo "== the server, in an environment of its own"
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-index dist/longshore-*.whl
# A folder named in a .pth has its own .pth files ignored: the editable install of the checkout stays out.
site_packages "$repository/.venv" >"$(site_packages "$folder/venv")/third_party.pth"
ln -s "$repository/.venv/bin/temporal" "$folder/venv/bin/temporal"
cp -r examples "$folder/examples"  # not in the wheel: they make the tiny model and its data

cd "$folder"
for name in shared service workflows activities megatron_worker; do
    mkdir "$name"
    echo 'OWNER = "the project"' >"$name/__init__.py"
    cp -r "$name" "$(site_packages "$folder/venv")"
    cp -r "$name" "$(site_packages "$folder/client")"
done
export PATH=$folder/venv/bin:$PATH LONGSHORE_WANDB_MODE=disabled
python - "$repository" <<'PYTHON'
import importlib, sys
import longshore.client
import longshore.server
assert not longshore.server.FOLDER.startswith(sys.argv[1]), "Longshore is the checkout's"
for name in longshore.server.PACKAGES:
    assert importlib.import_module(name).OWNER == "the project", name
try:
    import longshore.trainer_rank
except ImportError as error:
    assert "cannot be imported beside yours" in str(error), error
else:
    raise AssertionError("TrainerRank needs `shared` for itself")
PYTHON
python -c 'import longshore.trainer_rank as ours, service; print(ours.TrainerRank, service.OWNER)'
python -c 'import longshore.local as ours, service; print(ours.train, service.OWNER)'

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
# A program of the project, which trains on the stack.
cat >program.py <<'PYTHON'
import json
import activities, megatron_worker, service, shared, workflows
from pathlib import Path
from longshore import Client, Datum, Lora, SessionRun
stack = json.load(open("first/root/dev.json"))
with Client(stack["api_url"], stack["api_key"]) as client:
    session = client.sessions.open(SessionRun(model=str(Path("first/model").resolve()), trainable=Lora(rank=4)))
    session.forward_backward([Datum(tokens=(1, 2, 3, 4))])
    metrics = session.optim_step(learning_rate=1e-3).result().metrics
    session.close()
packages = (activities, megatron_worker, service, shared, workflows)
assert metrics and all(package.OWNER == "the project" for package in packages)
print("a step of the project's own:", metrics)
PYTHON
sed -i 's/^longshore doctor$/longshore doctor\npython page.py\nclient\/bin\/python program.py/' commands.sh
bash -euo pipefail commands.sh
test -s first/adapter/adapter_model.safetensors
echo "the wheel works"
