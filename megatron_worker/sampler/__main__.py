"""The sampler's entry point.

    python -m megatron_worker.sampler --model FOLDER --port 0 --ready-file FILE

It answers requests with the key on loopback, or with `--socket` at a Unix socket, and writes the address and the
key into the ready file (mode 600) as soon as it is ready. It exits on SIGTERM, and when its parent (or the host of
`--host-record`) is gone. Exit status 2: the model cannot be used.
"""

import argparse
import json
import os
import secrets
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import get_args

from longshore.training import Dtype
from megatron_worker.process.startup import on_signals, slow_imports, start_watchdog
from shared.chat.completions import LogprobsMode, SamplerReady
from shared.errors import InvalidInput
from shared.log_lines import escape_output
from shared.models.end_tokens import read_end_ids
from shared.storage.files import reachable, write_atomically


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    start_watchdog(options.host_record)
    os.umask(0o077)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS; read when CUDA starts
    try:
        serve(options)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def serve(options: argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. This thread computes; others do HTTP."""
    with slow_imports():
        import torch
        from tokenizers import Tokenizer

        from megatron_worker.sampler.answers import AnswerLimits, Answers
        from megatron_worker.sampler.decoder import Decoder
        from megatron_worker.sampler.generation import Generator
        from megatron_worker.sampler.models import Models, Sleep
        from megatron_worker.sampler.server import Server, listening
        from megatron_worker.weight_sync.connections import accept_locally, accept_remotely

    torch.set_num_threads(options.threads)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokenizer_file = options.model / "tokenizer.json"
    if not tokenizer_file.exists():
        raise InvalidInput("the model has no tokenizer.json", str(options.model))
    decoder = Decoder(options.model, getattr(torch, options.dtype), device)
    generator = Generator(decoder, options.slots, options.kept_bytes)
    made_for = json.loads((options.model / "config.json").read_bytes()).get("max_position_embeddings")
    longest = min(decoder.architecture.max_positions or sys.maxsize, int(made_for or sys.maxsize))
    limits = AnswerLimits(min(options.max_model_len, longest), options.logprobs_mode, longest)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    name = options.served_model_name or str(options.model)
    models = Models(name, options.model, decoder, generator, limits.max_model_len)
    end_ids = frozenset([*read_end_ids(options.model), *options.end_ids])
    answers = Answers(models, decoder, tokenizer, end_ids, generator, limits)
    listener = listening(options.port if options.socket is None else options.socket)
    server = Server(answers, Sleep(decoder, models, generator), _key(options.key_file), listener)
    on_signals(generator.stop)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    if options.weights_socket is not None:
        accept_locally(options.weights_socket, models.receive)
    address = None
    if options.weights_address is not None:
        key = bytes.fromhex(_key(options.weights_key_file))
        address = accept_remotely(options.weights_address, key, models.receive)
    with nullcontext() if options.socket is None else reachable(options.socket) as path:
        ready = SamplerReady(
            url=server.url, socket=path, api_key=server.api_key, pid=os.getpid(), model=name, weights_address=address
        )
        write_atomically(options.ready_file, ready.model_dump_json().encode())
        generator.run()
    options.ready_file.unlink(missing_ok=True)


def _key(file: Path | None) -> str:
    key = secrets.token_urlsafe(24) if file is None else file.read_text().strip()
    if not key:
        raise InvalidInput("the file holds no key", str(file))
    return key


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megatron_worker.sampler", description="A sampler of our own.")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--ready-file", type=Path, required=True, help="where the address and the key are written")
    parser.add_argument("--served-model-name", help="what requests call the model; its folder unless given")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--socket", type=Path, help="the path at which it answers; no port is opened then")
    place.add_argument("--port", type=int, default=0, help="on loopback; 0: a free one")
    parser.add_argument("--key-file", type=Path, help="the bearer key; made up unless given")
    parser.add_argument("--host-record", type=Path, help="a worker.json: leave when that host is gone")
    parser.add_argument("--weights-socket", type=Path, help="a path at which trainers of this machine send weights")
    parser.add_argument("--weights-address", help="an IP address at which trainers of other machines send weights")
    parser.add_argument("--weights-key-file", type=Path, help="in hexadecimal, by which those are known")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="float32")
    parser.add_argument("--device", help="cuda where there is one, unless given")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; part of what makes a result bit-identical")
    parser.add_argument("--slots", type=int, default=32, help="sequences a step; part of that too")
    parser.add_argument("--kept-bytes", type=int, default=1 << 30, help="for the states of prompts that may go on")
    parser.add_argument("--max-model-len", type=int, default=4096, help="prompt and completion together, in tokens")
    parser.add_argument(
        "--end-ids", type=int, nargs="*", default=[], help="tokens that end a sample, beside the model's own"
    )
    parser.add_argument("--logprobs-mode", choices=get_args(LogprobsMode), default="raw_logprobs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    escape_output()
    sys.exit(main())
