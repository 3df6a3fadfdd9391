"""What the heads hold in memory, counted from sizes: head/logprobs.py, heads.py and what autograd makes around them.

Each line below is a tensor of theirs; the tests count live bytes and compare. Bytes of a few numbers a row that live
while nothing large does are left out.

Letters: N rows, H hidden size, V ids of this rank's shard, C rows of a chunk, K ids a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_worker.head.torch_tiles import CPU_TILE, DEVICE_TILE
from megatron_worker.head.workspace import scan_bytes
from megatron_worker.trainer_rank.heads import gathered_rows
from megatron_worker.trainer_rank.inputs import Request

_KEY_BYTES = 20  # a logit's key in the making: its bits, and the key twice
_UNPACK_BYTES = 48  # a key's logit and id in the making


@dataclass(frozen=True, order=True)
class Question:
    """Rows of one question meet a head together; a pack's are told apart, and sorted, as forward.py does."""

    kind: str
    entropy: bool = False
    temperature: float = 1.0
    top_k: int = 0


@dataclass
class Rows:
    """Of one question: how many, how many of the input that has the most, labels a row at most; what is answered."""

    num: int = 0
    most: int = 0
    labels: int = 0
    has_logprobs: bool = False

    def copy(self) -> "Rows":
        return Rows(self.num, self.most, self.labels, self.has_logprobs)

    def add(self, request: Request) -> None:
        count = len(request.position_P)
        self.num, self.most = self.num + count, max(self.most, count)
        if request.label_PK is not None:
            self.labels = max(self.labels, request.label_PK.shape[1])
        self.has_logprobs |= request.asked.target_logprobs


def questions(request: Request) -> Iterator[Question]:
    for kind in request.kinds:
        asked = request.asked
        match kind:
            case "scores":
                yield Question(kind, entropy=asked.entropy, temperature=asked.temperature)
            case "ranks":
                yield Question(kind, temperature=asked.temperature, top_k=asked.top_k)
            case _:
                yield Question(kind)


@dataclass(frozen=True)
class HeadBytes:
    """Of one question in a pack.

    Attributes:
        outputs: what the user holds.
        gradient: of outputs, where a graph is kept: what a loss gives back, all inputs' together.
        largest: the outputs of the input that has the most.
        graph: what is kept for the backward beside rows of hidden states.
        forward: the most during the head's forward, beside what stood before it; `outputs` and `graph` are in it.
        backward: the most during its backward, beside outputs, graph and gradient.
    """

    outputs: float
    gradient: float
    largest: float
    graph: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Head:
    """Sizes that heads' bytes follow from.

    Attributes:
        dtype: of hidden states and output embedding.
        num_shards: ranks that share the vocabulary.
        kernels: whether Triton's scan is used.
        on_device: whether ids that come from the host are copied, and so count.
        is_cut: whether packs are cut over context-parallel ranks, and hidden states brought together.
    """

    hidden_size: int
    vocab_size: int
    shard_size: int
    dtype: torch.dtype
    num_shards: int = 1
    kernels: bool = False
    on_device: bool = False
    is_cut: bool = False

    @property
    def element(self) -> int:
        return self.dtype.itemsize

    @property
    def exact(self) -> int:
        """Bytes of a number in the softmax's dtype."""
        return max(4, self.element)

    @property
    def row(self) -> int:
        """Bytes of a hidden state."""
        return self.hidden_size * self.element

    @property
    def is_rounded(self) -> bool:
        return self.element < self.exact

    def bytes_of(self, question: Question, rows: Rows, keeps_graph: bool) -> HeadBytes:
        match question.kind:
            case "scores":
                return self._scores(question, rows, keeps_graph)
            case "ranks":
                return self._ranks(question, rows, keeps_graph)
            case "logits":
                return self._logits(rows, keeps_graph)
            case _:
                # Views of the backbone's hidden states, which are counted there.
                gradient = rows.num * self.row * keeps_graph
                return HeadBytes(0, gradient, rows.most * self.row, 0, 0, gradient)

    def _scores(self, question: Question, rows: Rows, keeps_graph: bool) -> HeadBytes:
        column = rows.num * self.exact
        outputs = column * (rows.has_logprobs + question.entropy)
        gradient = column * rows.has_logprobs * keeps_graph
        return HeadBytes(
            outputs=outputs,
            gradient=gradient,
            largest=rows.most * self.exact,
            graph=self._scan_graph(rows.num, keeps_graph),
            forward=self._scan(rows.num, question.entropy, 0, keeps_graph),
            backward=self._scan_backward(rows.num, keeps_graph),
        )

    def _ranks(self, question: Question, rows: Rows, keeps_graph: bool) -> HeadBytes:
        num, k, ids = rows.num, question.top_k, rows.labels + question.top_k
        label_NK, top_NK, id_NK = (num * n * self.exact for n in (rows.labels, k, ids))
        logprobs = id_NK if rows.labels else 0  # labels are views of both
        outputs = logprobs + top_NK + num * k * 8
        scanned = self._scan_graph(num, keeps_graph)
        graph = scanned + num * (ids + 1) * 8 * keeps_graph
        chunks, own_ids = self._gathered(num, ids), num * (ids + 1 + rows.labels * self.on_device) * 8
        found = scanned + own_ids + num * self.exact + num * k * (self.exact + 8)  # of the scan, and ids
        gradient = (label_NK + top_NK) * keeps_graph
        # Gradients of the parts of an output, of the whole, and of both outputs' whole; then of the hidden states,
        # of the scan's rows and of the gathered ones.
        of_outputs = 3 * id_NK
        of_hidden = num * self.row + max(chunks, self._scan_backward(num, keeps_graph))
        return HeadBytes(
            outputs=outputs,
            gradient=gradient,
            largest=rows.most * ids * self.exact,
            graph=graph,
            forward=max(
                num * 8 + self._scan(num, False, k, keeps_graph),
                found + id_NK + max(chunks, 2 * id_NK + 2 * top_NK),
            ),
            backward=max(of_outputs, id_NK + of_hidden) * keeps_graph,
        )

    def _gathered(self, num: int, ids: int) -> float:
        """Rows of the embedding for some rows' ids: one lot while the one before it is still held."""
        if not num or not ids:
            return 0
        step = gathered_rows(ids, self.hidden_size, self.shard_size)
        lot = min(num, step) * ids * self.hidden_size * self.exact
        rounded = min(num, step) * ids * self.row if self.is_rounded else 0
        return lot * (2 if num > step else 1) + rounded + min(num, step) * (ids * 25 + self.hidden_size * self.exact)

    def _logits(self, rows: Rows, keeps_graph: bool) -> HeadBytes:
        own = rows.num * self.shard_size * self.exact
        rounded = rows.num * self.shard_size * self.element if self.is_rounded else 0
        outputs, forward = own, own + rounded
        if self.num_shards > 1:
            outputs = rows.num * self.vocab_size * self.exact
            forward = own + max(rounded, 2 * own * self.num_shards + outputs)
        gradient = rows.num * self.vocab_size * self.exact * keeps_graph
        return HeadBytes(
            outputs=outputs,
            gradient=gradient,
            largest=rows.most * self.vocab_size * self.exact,
            graph=0,
            forward=forward,
            backward=max(gradient, rounded + rows.num * self.row) * keeps_graph,
        )

    def _scan_graph(self, num: int, keeps_graph: bool) -> float:
        """Each target's row, logsumexp and expected logit, and on a device its label."""
        return num * (self.hidden_size * self.exact + 2 * self.exact + 8 * self.on_device) * keeps_graph

    def _scan(self, num: int, entropy: bool, k: int, keeps_graph: bool) -> float:
        """The most during head/logprobs.py's forward."""
        rows = num * self.hidden_size * self.exact * keeps_graph
        columns = num * (4 * self.exact + 18 + 8 * k + 8 * self.on_device)
        label_rows = rows + (num * self.row if self.is_rounded else 0) * keeps_graph
        merged = num * (7 * self.exact + k * (_UNPACK_BYTES + self.exact))
        work = self._kernels(num, k, keeps_graph) if self.kernels else self._tiles(num, entropy, k, keeps_graph)
        return columns + max(rows + label_rows, 2 * rows + max(work, merged))

    def _tiles(self, num: int, entropy: bool, k: int, keeps_graph: bool) -> float:
        """The most while torch scans a tile of logits at a time."""
        tile = DEVICE_TILE if self.on_device else CPU_TILE
        chunk, columns = min(num, tile.targets), min(self.shard_size, tile.columns)
        logits = chunk * columns * self.exact
        rounded = chunk * columns * self.element if self.is_rounded else 0
        keys = chunk * columns * _KEY_BYTES + max(chunk, 8) * columns + 8 * columns if k else 0
        product = (rounded + chunk * self.row) * keeps_graph
        return logits + rounded + max(keys, logits * entropy + product)  # exponentials beside the logits

    def _kernels(self, num: int, k: int, keeps_graph: bool) -> float:
        return scan_bytes(num, self.shard_size, self.hidden_size, self.dtype, num_buffers=int(keeps_graph), top_k=k)

    def _scan_backward(self, num: int, keeps_graph: bool) -> float:
        exact = num * self.hidden_size * self.exact
        rounded = num * self.row if self.is_rounded else 0
        return (num * 2 * self.exact + exact + rounded) * keeps_graph
