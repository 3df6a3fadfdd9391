"""What torchrun, transformers and PEFT take from nothing to a first optimizer step: the rival of cold_start.py.

    torchrun --nproc_per_node 1 -m benchmarks.plain_peft MODEL DATA.jsonl SINCE [--endpoint URL]

MODEL is a folder, or `s3://bucket/prefix`, which boto3 downloads first. SINCE: seconds since 1970 when torchrun was
started. The last line printed is JSON: seconds by phase.
"""

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("since", type=float)
    parser.add_argument("--endpoint")
    given = parser.parse_args()
    reached = [("", given.since), ("torchrun", time.time())]
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.distributed.init_process_group("gloo")
    reached.append(("imports", time.time()))
    with tempfile.TemporaryDirectory() as scratch:
        folder = _fetch(given.model, Path(scratch), given.endpoint) if "://" in given.model else Path(given.model)
        reached.append(("fetch", time.time()))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        reached.append(("weights", time.time()))
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)
        rows = [json.loads(line)["messages"] for line in given.data.read_text().splitlines()]
        batch = tokenizer.apply_chat_template(rows, return_dict=True, return_tensors="pt", padding=True)
        reached.append(("adapter and data", time.time()))
        model(**batch, labels=batch["input_ids"]).loss.backward()
        optimizer.step()
        reached.append(("first pass", time.time()))
    print(json.dumps({name: now - before for (_, before), (name, now) in pairwise(reached)}))


def _fetch(uri: str, folder: Path, endpoint: str | None) -> Path:
    import boto3

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=endpoint)
    for each in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
        client.download_file(bucket, each["Key"], str(folder / Path(each["Key"]).name))
    return folder


if __name__ == "__main__":
    main()
