"""A fine-tuning by the Python client, from a file to an answer: `python -m examples.finetune MODEL ROWS.jsonl NAME`.

The service is the one that the command line uses, for example the stack of `longshore dev`.
"""

import argparse
from pathlib import Path

from longshore import Client, DatasetSource, Lora, SFTRun, show_progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder, or an id of the hub")
    parser.add_argument("rows", type=Path, help="a dataset: docs/datasets.md has the formats")
    parser.add_argument("name", help="the name to publish the adapter under")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    with Client() as client:
        finetune(client, given.model, given.rows, given.name, given.steps)


def finetune(client: Client, model: str, rows: Path, name: str, steps: int) -> str:
    """Train an adapter, fetch it into a folder of its name, and ask it something. Returns its answer."""
    uri = Path(model).resolve().as_uri() if Path(model).is_dir() else model
    dataset = DatasetSource(uri=client.files.upload(rows).uri)
    run = client.runs.submit(
        SFTRun(model=uri, dataset=dataset, trainable=Lora(rank=8), name=name, steps=steps, batch_size=8, max_tokens=512)
    )
    run = client.runs.wait(run.run_id, progress=show_progress)
    if run.state != "succeeded":
        raise SystemExit(f"{run.run_id} {run.state}" + (f": {run.problem.message}" if run.problem else ""))
    losses = [step.metrics["loss"] for step in client.runs.metrics(run.run_id).steps]
    print(f"{run.run_id} published {name}:v{run.version}; loss {losses[0]:.3f} to {losses[-1]:.3f}")
    client.models.download(name, name)
    question = {"model": name, "messages": [{"role": "user", "content": "What can you tell me?"}], "max_tokens": 64}
    answer = "".join(
        choice["delta"].get("content") or "" for chunk in client.chat(question) for choice in chunk["choices"]
    )
    print(answer)
    return answer


if __name__ == "__main__":
    main()
