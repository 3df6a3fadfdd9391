#!/bin/sh
# Renders the plain manifests from the chart: infra/helm/render.sh HELM FOLDER (make manifests)
set -eu
helm=$1 folder=$2
for name in settings control gpu-host sampler-host network; do
    {
        echo "# Rendered from infra/helm/longshore by make manifests: change that, not this."
        "$helm" template longshore "$(dirname "$0")/longshore" --show-only "templates/$name.yaml" | grep -v '^# Source: '
    } > "$folder/$name.yaml"
done
