"""What each rank of an FSDP engine does in test_fsdp_layouts.py.

python -m megatron_worker.process.launcher N tests.megatron_worker.fsdp_layout_ranks MODEL OUT LAYOUT SINGLE
python -m megatron_worker.process.launcher N tests.megatron_worker.fsdp_layout_ranks refused MODEL WORDS
python -m megatron_worker.process.launcher N tests.megatron_worker.fsdp_layout_ranks head MODEL OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from longshore.layout import Layout
from longshore.training import Lora
from megatron_worker.process.ranks import start_group
from shared.errors import InvalidInput
from tests.megatron_worker.driving import train
from tests.megatron_worker.engines import start
from tests.megatron_worker.fsdp_ranks import RATES, STEPS, go_on, note, run, run_trees


def refuse(model: Path, words: str) -> None:
    """Every rank is told the rule."""
    try:
        start("fsdp", model, layout=Layout(tp=2, dp=dist.get_world_size() // 2))
    except InvalidInput as error:
        assert words in str(error), error
    else:
        raise AssertionError("accepted")


def train_head(model: Path, layout: Layout, out: Path) -> None:
    """Three steps of an adapter of output layer, embeddings and one linear."""
    engine = start("fsdp", model, layout=layout)
    engine.add_adapter("run", Lora(rank=4, alpha=8, targets=("q_proj", "lm_head", "embed_tokens")), seed=3)
    note(out / "history.json", train(engine, STEPS[:3]))
    engine.save(out / "end")


def main() -> None:
    torch.set_num_threads(1)
    start_group("gloo")
    if sys.argv[1] == "refused":
        refuse(Path(sys.argv[2]), sys.argv[3])
        dist.destroy_process_group()
        return
    if sys.argv[1] == "head":
        train_head(Path(sys.argv[2]), Layout(tp=2, dp=dist.get_world_size() // 2), Path(sys.argv[3]))
        dist.destroy_process_group()
        return
    model, out = (Path(argument) for argument in sys.argv[1:3])
    layout, single = Layout.model_validate_json(sys.argv[3]), Path(sys.argv[4])
    run(model, layout, out)
    run_trees(model, layout, single / "lora" / "end" / "weights", out / "trees")
    for kind in RATES:
        go_on(model, layout, out / kind / "middle", kind, out / kind / "resumed")
        go_on(model, layout, single / kind / "middle", kind, out / kind / "from-single")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
