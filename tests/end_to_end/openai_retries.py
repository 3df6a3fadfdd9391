"""Makes jobs one after another with OpenAI's client, which sends again what got no answer. Tells the ids as JSON.

python -m tests.end_to_end.openai_retries URL KEY MODEL DATASET NUMBER
"""

import json
import sys

import openai
import openai._base_client

_LONGEST_PAUSE_S = 1.0


def main() -> None:
    url, key, model, dataset, number = sys.argv[1:]
    # By itself it pauses for up to 8 s: the service would be killed several times while it asks nothing.
    openai._base_client.MAX_RETRY_DELAY = _LONGEST_PAUSE_S
    # As many retries as a restart on a loaded machine may need.
    client = openai.OpenAI(base_url=url, api_key=key, timeout=60, max_retries=600)
    ids = {}
    for n in range(int(number)):
        job = client.fine_tuning.jobs.create(
            model=model,
            training_file=dataset,
            metadata={"number": str(n)},
            extra_body={"longshore": {"steps": 1, "max_tokens": 64}, "hyperparameters": {"batch_size": 1}},
        )
        ids[str(n)] = job.id
        print(f"job {n}: {job.id}", file=sys.stderr, flush=True)
    print(json.dumps(ids))


if __name__ == "__main__":
    main()
